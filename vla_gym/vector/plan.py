"""Which environments a vector environment has: its arguments, checked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from vla_gym.envs.checks import (
    MAX_ENVS,
    MAX_SEED,
    MAX_TIMEOUT_S,
    as_integer,
    as_number,
    as_options,
    check_flag,
    parse_reset_options,
    parse_tasks,
)
from vla_gym.errors import ConfigError
from vla_gym.suites import Suite, get_suite

if TYPE_CHECKING:
    from vla_gym.envs.libero import LiberoEnv

_OPTIONS = ("task_id", "init_state_id")
Wrappers = Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]]


@dataclass(frozen=True)
class EnvPlan:
    """Which environments a vector environment has.

    Attributes:
        num_envs: N.
        make_env: Builds environment ``first + i`` of the vector environment that this is a part of.
        first: Number of environment 0 in that one.
        group_size: So many consecutive environments play the same.
        suite: Of bare ``LiberoEnv``; None with a factory or wrappers.
        scenes: Arguments of ``vector.preload.preload``; None with a factory.
    """

    num_envs: int
    make_env: Callable[[int], gym.Env[Any, Any]]
    group_size: int = 1
    suite: Suite | None = None
    scenes: Mapping[str, Any] | None = None
    first: int = 0

    @classmethod
    def make(
        cls,
        num_envs: int,
        suite: str | Sequence[str] | None,
        *,
        task_ids: int | str | Sequence[int | str] | Sequence[Sequence[int | str]] | None = None,
        task_sampling: str = "uniform",
        group_size: int = 1,
        env_wrappers: Wrappers = (),
        env_factory: Callable[[int], gym.Env[Any, Any]] | None = None,
        **env_kwargs: Any,
    ) -> EnvPlan:
        """Check the arguments; see ``LiberoVectorEnv``.

        Raises:
            ConfigError, UnknownTaskError: If one is out of range.
        """
        num_envs = as_integer(num_envs, "num_envs", 1, MAX_ENVS)
        group_size = as_integer(group_size, "group_size", 1, num_envs)
        if num_envs % group_size:
            raise ConfigError(
                f"num_envs={num_envs} is no multiple of group_size={group_size}: the last group "
                "would be short."
            )
        wrappers = env_wrappers if isinstance(env_wrappers, Sequence) else [env_wrappers]
        for made in (*wrappers, *([] if env_factory is None else [env_factory])):
            if not callable(made):
                raise ConfigError(
                    f"env_wrappers are functions, env_factory is one; got {made!r:.80}."
                )
        if env_factory is not None:
            if suite or task_ids is not None or env_kwargs or task_sampling != "uniform":
                raise ConfigError(
                    "env_factory builds the environments by itself: leave out "
                    f"{', '.join(['suite', 'task_ids', 'task_sampling', *env_kwargs])}."
                )
            make = functools.partial(_build, make=env_factory, wrappers=tuple(wrappers))
            return cls(num_envs, make, group_size)
        if suite is None:
            raise ConfigError("Give a suite, e.g. suite='goal', or an env_factory.")
        if "env_index" in env_kwargs:
            raise ConfigError("env_index is for a single environment: leave it out.")
        found = get_suite(suite)
        lists = _task_lists(found, task_ids, num_envs, group_size)
        kwargs = {"task_sampling": task_sampling, "group_size": group_size, **env_kwargs}
        libero = functools.partial(_libero_env, suite=found.name, task_lists=lists, kwargs=kwargs)
        make = functools.partial(_build, make=libero, wrappers=tuple(wrappers))
        # Checks all arguments: nothing is simulated before the first reset.
        env = libero(0)
        env.close()
        kwargs["assets"] = env.assets  # whatever VLA_GYM_ASSETS says when a worker is replaced
        draws = bool(env.cameras) or env.render_mode is not None
        scenes = {
            "tasks": [
                (task.suite, task.task_id)
                for task in (found.tasks[i] for i in sorted(set().union(*lists)))
            ],
            "assets": str(env.assets),
            "clutter": env.cluttered,
            "images": bool(env_wrappers) or draws,
            "drawing": env.drawing if draws else None,
        }
        return cls(num_envs, make, group_size, None if env_wrappers else found, scenes)

    def part(self, env_ids: range) -> EnvPlan:
        """Return the plan of consecutive environments alone; they play what they play in all.

        Raises:
            ConfigError: If they are none, or not of this plan.
        """
        is_range = isinstance(env_ids, range) and env_ids.step == 1
        if not is_range or not 0 <= env_ids.start < env_ids.stop <= self.num_envs:
            raise ConfigError(
                f"env_ids must be a range of consecutive numbers within 0..{self.num_envs - 1}, "
                f"got {env_ids}."
            )
        return dataclasses.replace(self, num_envs=len(env_ids), first=env_ids.start)

    def seeds(
        self, ids: np.ndarray, seed: int | Sequence[int | None]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return which environments get a new seed, and these seeds.

        Args:
            ids: Environments that are reset.
            seed: Environment i gets ``seed + i``, or entry i of a sequence, None for none.

        Raises:
            ConfigError: Wrong length, a negative seed, or seeds that tear a group apart.
        """
        if isinstance(seed, int | np.integer):
            number = as_integer(seed, "seed", 0, MAX_SEED) + self.first
            seeds: list[int | None] = [number + i for i in range(self.num_envs)]
        else:
            given = seed if isinstance(seed, Sequence | np.ndarray) else [seed]
            seeds = [None if s is None else as_integer(s, "seed", 0, MAX_SEED) for s in given]
        if len(seeds) != self.num_envs:
            raise ConfigError(f"Expected {self.num_envs} seeds, got {len(seeds)}.")
        rows = np.array([i for i in ids.tolist() if seeds[i] is not None], np.int64)
        values = np.array([seeds[i] for i in rows.tolist()], np.int64)
        keys: dict[int, set[int]] = {}
        groups = (self.first + np.arange(self.num_envs)) // self.group_size
        for i, value in zip(rows.tolist(), values.tolist(), strict=True):
            keys.setdefault(groups[i], set()).add(value - (self.first + i) % self.group_size)
        whole = np.isin(np.flatnonzero(np.isin(groups, groups[rows])), rows).all()
        if not whole or any(len(starts) > 1 for starts in keys.values()):
            raise ConfigError(
                f"With group_size={self.group_size} all environments of a group must get seeds "
                f"that follow each other, so that it plays the same layouts; got {seeds} for the "
                f"environments {ids.tolist()}."
            )
        return rows, values

    def reset_options(
        self, options: Mapping[str, Any] | None
    ) -> tuple[np.ndarray, dict[int, dict[str, Any]]]:
        """Return which environments are reset, and the options of each that has any.

        Raises:
            ConfigError, UnknownTaskError: If an option is unknown or out of range.
        """
        options = as_options(options)
        ids = np.arange(self.num_envs)
        mask = options.pop("reset_mask", None)
        if mask is not None:
            mask = np.asarray(mask)
            if mask.dtype != bool or mask.shape != (self.num_envs,) or not mask.any():
                raise ConfigError(
                    f"reset_mask must be a bool array of shape ({self.num_envs},) with a True in "
                    f"it, got {mask}."
                )
            ids = np.flatnonzero(mask)
        per_env: dict[int, dict[str, Any]] = {i: {} for i in ids.tolist()}
        for key, value in options.items():
            is_row = isinstance(value, np.ndarray) and value.ndim == 1
            listed = is_row or isinstance(value, list | tuple)
            each = key in _OPTIONS and listed and len(value) == self.num_envs
            if self.suite is not None and key in _OPTIONS and listed and not each:
                raise ConfigError(
                    f"{key} must be one number, or one for each of the {self.num_envs} "
                    f"environments; got {len(value)}."
                )
            for i, own in per_env.items():
                one = value[i] if each else value
                if key not in _OPTIONS or not np.array_equal(one, -1):
                    own[key] = one
        if self.suite is not None:  # what LiberoEnv would say, before anything moves
            for own in per_env.values():
                parse_reset_options(self.suite, own)
        return ids, {i: own for i, own in per_env.items() if own}


def parse_autoreset_mode(value: AutoresetMode | str) -> AutoresetMode:
    """Return the autoreset mode of that name or value.

    Raises:
        ConfigError: If there is none.
    """
    named = {text.upper(): mode for mode in AutoresetMode for text in (mode.name, mode.value)}
    found = named.get(str(getattr(value, "value", value)).upper())
    if found is None:
        names = ", ".join(mode.name for mode in AutoresetMode)
        raise ConfigError(f"autoreset_mode must be one of {names}; got {value!r:.80}.")
    return found


def _build(
    index: int, make: Callable[[int], gym.Env[Any, Any]], wrappers: Wrappers
) -> gym.Env[Any, Any]:
    env = make(index)
    for wrapper in wrappers:
        env = wrapper(env)
        if not isinstance(env, gym.Env):
            raise ConfigError(f"env_wrappers must return environments, got {env!r:.80}.")
    return env


def _libero_env(
    index: int, suite: str, task_lists: Sequence[Sequence[int]], kwargs: Mapping[str, Any]
) -> LiberoEnv:
    from vla_gym.envs.libero import LiberoEnv

    tasks = task_lists[index % len(task_lists)]
    return LiberoEnv(suite, task_ids=tasks, env_index=index, **kwargs)


def _task_lists(
    suite: Suite, task_ids: int | str | Sequence[Any] | None, num_envs: int, group_size: int
) -> tuple[tuple[int, ...], ...]:
    if not isinstance(task_ids, str | int | np.integer | Sequence | np.ndarray | None):
        raise ConfigError(f"task_ids must be a task, or a sequence of them, got {task_ids!r:.80}.")
    nested = not isinstance(task_ids, str | int | np.integer | None) and any(
        isinstance(entry, Sequence | np.ndarray) and not isinstance(entry, str)
        for entry in task_ids
    )
    entries: Sequence[Any] = task_ids if nested else (task_ids,)  # type: ignore[assignment]
    lists = tuple(parse_tasks(suite, entry) for entry in entries)
    if not all(lists):
        raise ConfigError(f"Every environment needs a task, got task_ids={task_ids}.")
    if not nested:
        return lists
    if len(lists) != num_envs:
        raise ConfigError(
            f"Nested task_ids need one list for each of the {num_envs} environments, got "
            f"{len(lists)}."
        )
    if any(lists[i] != lists[i - i % group_size] for i in range(num_envs)):
        raise ConfigError(
            f"With group_size={group_size} all environments of a group need the same tasks, "
            f"got task_ids={task_ids}."
        )
    return lists


def check_limits(
    max_restarts: Any, step_timeout: Any, start_timeout: Any, copy: Any
) -> tuple[int, float, float]:
    """Return the first three of these arguments of a vector environment.

    Raises:
        ConfigError: If one is out of range.
    """
    check_flag(copy, "copy")
    return (
        as_integer(max_restarts, "max_restarts", 0),
        as_number(step_timeout, "step_timeout", 0, MAX_TIMEOUT_S, above=True),
        as_number(start_timeout, "start_timeout", 0, MAX_TIMEOUT_S, above=True),
    )
