"""Checks of an environment's arguments; each failure is one clear error."""

from __future__ import annotations

import difflib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.suites import Suite, task_number

#: Largest values of arguments that decide memory or time: far above any use.
MAX_CHUNK_LEN, MAX_ENVS, MAX_HISTORY, MAX_IMAGE_SIZE = 1000, 16_384, 1024, 4096
#: Most no-ops before an episode: 500 s of LIBERO's.
MAX_SETTLE_STEPS = 10_000
#: Longest deadline in seconds: a day, which every clock and call can count.
MAX_TIMEOUT_S = 86_400.0
#: Largest seed; those of a vector environment's environments come after it.
MAX_SEED = 2**62


def check_choice(value: Any, name: str, allowed: Sequence[Any]) -> None:
    """Check that an argument is one of a few values.

    Raises:
        ConfigError: If it is not.
    """
    if value not in allowed:
        choices = ", ".join(repr(choice) for choice in allowed)
        raise ConfigError(f"{name} must be one of {choices}; got {value!r:.80}.")


def check_flag(value: Any, name: str) -> None:
    """Check that an argument is True or False.

    Raises:
        ConfigError: If it is not.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} must be True or False, got {value!r:.80}.")


def check_keywords(given: Iterable[str], *functions: Callable[..., Any]) -> None:
    """Check that keyword arguments are there in one of the functions that will take them.

    Raises:
        ConfigError: If one is unknown; the message names the valid ones, the closest first.
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [inspect.signature(function).parameters.items() for function in functions]
    valid = sorted({name for found in parameters for name, p in found if p.kind in kinds})
    for name in given:
        if name not in valid:
            close = difflib.get_close_matches(name, valid, n=3)
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            rest = ", ".join([*close, *(other for other in valid if other not in close)])
            raise ConfigError(f"Unknown argument {name!r}.{hint} Valid ones: {rest}.")


def as_integer(value: Any, name: str, low: int | None = None, high: int | None = None) -> int:
    """Return an argument as an ``int``, from ``low`` to ``high`` (None: no bound).

    NumPy's integers are accepted, booleans are not.

    Raises:
        ConfigError: If it is not an integer, or out of range.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{name} must be an integer, got {value!r:.80}.") from None
    if low is not None and high is not None and not low <= number <= high:
        raise ConfigError(f"{name} must be in {low}..{high}, got {number}.")
    if low is not None and number < low:
        raise ConfigError(f"{name} must be at least {low}, got {number}.")
    return number


def as_number(value: Any, name: str, low: float, high: float, *, above: bool = False) -> float:
    """Return an argument as a ``float``, from ``low`` (with ``above`` itself not) to ``high``.

    NumPy's numbers are accepted, booleans are not.

    Raises:
        ConfigError: If it is no number, or out of range.
    """
    known = isinstance(value, int | float | np.integer | np.floating) and type(value) is not bool
    if not known or not low <= value <= high or (above and value == low):
        bracket = "(" if above else "["
        raise ConfigError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r:.80}.")
    return float(value)


def parse_cameras(suite: Suite, cameras: Sequence[str] | None) -> tuple[str, ...]:
    """Return names of a suite's cameras, of all for None.

    Raises:
        ConfigError: If they are no sequence of names, or there is no such camera.
    """
    if not isinstance(cameras, Sequence | None) or isinstance(cameras, str):
        raise ConfigError(f"cameras must be a sequence of names, got {cameras!r:.80}.")
    for camera in cameras or ():
        check_choice(camera, "cameras", tuple(suite.cameras))
    return tuple(suite.cameras if cameras is None else cameras)


def parse_tasks(suite: Suite, task_ids: int | str | Sequence[int | str] | None) -> tuple[int, ...]:
    """Return the indices in the suite of one task, several, or all (None); see ``task_number``.

    Raises:
        UnknownTaskError: If a task does not exist.
    """
    if task_ids is None:
        return tuple(range(len(suite.tasks)))
    if isinstance(task_ids, np.ndarray):
        task_ids = task_ids.tolist()
    one = isinstance(task_ids, str) or not isinstance(task_ids, Sequence)
    ids: Sequence[Any] = [task_ids] if one else task_ids  # type: ignore[assignment]
    return tuple(task_number(suite, task_id) for task_id in ids)


def parse_init_states(init_states: str | Sequence[int], count: int) -> Sequence[int]:
    """Return which of the ``count`` official states are played in turn; none: layouts are sampled.

    Args:
        init_states: ``"sampled"``, ``"official"`` (all of them) or their indices.
        count: How many there are.

    Raises:
        ConfigError: If it is something else, empty, or there is no such state.
    """
    if isinstance(init_states, np.ndarray):
        init_states = init_states.tolist()
    if init_states == "sampled":
        return ()
    check_has_states(count)
    if init_states == "official":
        return range(count)
    if isinstance(init_states, str) or not isinstance(init_states, Sequence):
        raise ConfigError(
            "init_states must be 'sampled', 'official' or a sequence of official states, "
            f"0..{count - 1}; got {init_states!r:.80}."
        )
    if not init_states:
        raise ConfigError("init_states must name at least one official state, got none.")
    return tuple(as_integer(i, "init_states", 0, count - 1) for i in init_states)


def check_has_states(count: int) -> None:
    """Check that a suite has official initial states.

    Raises:
        ConfigError: If it has none, as one of a user's own BDDL files.
    """
    if not count:
        raise ConfigError(
            "These tasks have no official initial states: leave init_states and init_state_id out; "
            "layouts are sampled, by seed."
        )


def as_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of reset options, {} for None.

    Raises:
        ConfigError: If they map no names to values.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"Reset options must be a dict or None, got {options!r:.80}.")
    if unnamed := [key for key in options or () if not isinstance(key, str)]:
        raise ConfigError(f"Reset options have names, got the keys {unnamed!r:.80}.")
    return dict(options or {})


def parse_reset_options(
    suite: Suite, options: Mapping[str, Any] | None
) -> tuple[int | None, int | None]:
    """Return the task's index and the official state that reset options ask for.

    Args:
        suite: The suite.
        options: ``task_id`` and ``init_state_id``, each an integer, or None or absent: as
            scheduled.

    Raises:
        ConfigError: If an option is unknown or not an integer, or there is no such state.
        UnknownTaskError: If there is no such task.
    """
    options = as_options(options)
    unknown = options.keys() - {"task_id", "init_state_id"}
    if unknown:
        raise ConfigError(
            f"Unknown reset options {sorted(unknown)}: expected 'task_id', 'init_state_id', and of "
            "a vector environment 'reset_mask'."
        )
    task_id, init_state_id = options.get("task_id"), options.get("init_state_id")
    if task_id is not None:
        task_id = task_number(suite, as_integer(task_id, "task_id"))
    if init_state_id is not None:
        check_has_states(suite.num_init_states)
        init_state_id = as_integer(init_state_id, "init_state_id", 0, suite.num_init_states - 1)
    return task_id, init_state_id
