"""Which environments a vector environment has: its arguments, checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

from vla_gym.envs.checks import parse_tasks
from vla_gym.errors import ConfigError
from vla_gym.suites import Task, get_suite
from vla_gym.variation import DomainVariation

_OPTIONS = ("task_id", "init_state_id")


def build_libero_env(
    index: int,
    suite: str,
    task_lists: Sequence[Sequence[int]],
    wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]],
    kwargs: Mapping[str, Any],
) -> gym.Env[Any, Any]:
    """Build environment ``index`` of a vector environment."""
    from vla_gym.envs.libero import LiberoEnv

    tasks = task_lists[index % len(task_lists)]
    env: gym.Env[Any, Any] = LiberoEnv(suite, task_ids=tasks, env_index=index, **kwargs)
    for wrapper in wrappers:
        env = wrapper(env)
    return env


@dataclass(frozen=True)
class EnvPlan:
    """Which environments a vector environment has.

    Attributes:
        num_envs: N.
        suite: Suite name; None with a factory.
        task_lists: Task ids of each environment, or one list for all.
        group_size: So many consecutive environments play the same.
        assets: Asset pack; None with a factory.
        make_env: Builds environment ``i``.
        plain: Whether the environments are bare ``LiberoEnv``: no factory, no wrappers.
        clutter: Whether their scenes have clutter.
        images: Whether they may draw.
    """

    num_envs: int
    suite: str | None
    task_lists: tuple[tuple[int, ...], ...]
    group_size: int
    assets: str | None
    make_env: Callable[[int], gym.Env[Any, Any]]
    plain: bool
    clutter: bool
    images: bool

    @classmethod
    def make(
        cls,
        num_envs: int,
        suite: str | Sequence[str] | None,
        *,
        task_ids: int | str | Sequence[int | str] | Sequence[Sequence[int | str]] | None,
        task_sampling: str,
        group_size: int,
        env_wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]],
        env_factory: Callable[[int], gym.Env[Any, Any]] | None,
        env_kwargs: Mapping[str, Any],
    ) -> EnvPlan:
        """Check the arguments; see ``LiberoVectorEnv``.

        Raises:
            ConfigError, UnknownTaskError: If one is out of range.
        """
        if not isinstance(num_envs, int | np.integer) or num_envs < 1:
            raise ConfigError(f"num_envs must be at least 1, got {num_envs}.")
        if not isinstance(group_size, int | np.integer) or not 1 <= group_size <= num_envs:
            raise ConfigError(f"group_size must be in 1..num_envs={num_envs}, got {group_size}.")
        if num_envs % group_size:
            raise ConfigError(
                f"num_envs={num_envs} is no multiple of group_size={group_size}: the last group "
                "would be short."
            )
        if env_factory is not None:
            given = [k for k in ("suite", "task_ids") if {"suite": suite, "task_ids": task_ids}[k]]
            if given or env_kwargs or task_sampling != "uniform":
                raise ConfigError(
                    "env_factory builds the environments by itself: leave out "
                    f"{', '.join([*given, *env_kwargs, 'task_sampling'])}."
                )
            make = functools.partial(
                _build_from_factory, factory=env_factory, wrappers=env_wrappers
            )
            return cls(num_envs, None, (), group_size, None, make, False, False, True)
        if suite is None:
            raise ConfigError("Give a suite, e.g. suite='goal', or an env_factory.")
        suite = get_suite(suite).name
        lists = _task_lists(suite, task_ids, num_envs, group_size)
        kwargs = {"task_sampling": task_sampling, "group_size": group_size, **env_kwargs}
        make = functools.partial(
            build_libero_env,
            suite=suite,
            task_lists=lists,
            wrappers=tuple(env_wrappers),
            kwargs=kwargs,
        )
        assets = str(env_kwargs.get("assets", "lite"))
        # Checks all arguments: nothing is simulated before the first reset.
        build_libero_env(0, suite, lists, (), kwargs).close()
        variation = DomainVariation.parse(env_kwargs.get("variation"))
        clutter = variation is not None and variation.distractors > 0
        plain = not env_wrappers
        cameras = env_kwargs.get("cameras")
        images = not plain or cameras is None or len(cameras) > 0
        return cls(num_envs, suite, lists, group_size, assets, make, plain, clutter, images)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Every task that is played."""
        ids = sorted({i for tasks in self.task_lists for i in tasks})
        return tuple(get_suite(self.suite).tasks[i] for i in ids) if self.suite else ()

    def tasks_of(self, env_id: int) -> tuple[Task, ...]:
        """Return the tasks of one environment."""
        if not 0 <= env_id < self.num_envs:
            raise ConfigError(f"env_id must be in 0..{self.num_envs - 1}, got {env_id}.")
        if self.suite is None:
            return ()
        tasks = self.task_lists[env_id % len(self.task_lists)]
        return tuple(get_suite(self.suite).tasks[i] for i in tasks)

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
            seeds: list[int | None] = [int(seed) + i for i in range(self.num_envs)]
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ConfigError(f"Expected {self.num_envs} seeds, got {len(seeds)}.")
        rows = np.array([i for i in ids.tolist() if seeds[i] is not None], np.int64)
        values = np.array([seeds[i] for i in rows.tolist()], np.int64)
        if (values < 0).any():
            raise ConfigError(f"Seeds must not be negative, got {values.min()}.")
        keys: dict[int, int] = {}
        for i, value in zip(rows.tolist(), values.tolist(), strict=True):
            key = value - i % self.group_size
            if keys.setdefault(i // self.group_size, key) != key:
                raise ConfigError(
                    f"With group_size={self.group_size} the seeds of a group must follow each "
                    f"other, so that it plays the same layouts; got {seeds}."
                )
        return rows, values

    def reset_options(
        self, options: Mapping[str, Any] | None
    ) -> tuple[np.ndarray, dict[int, dict[str, Any]]]:
        """Return which environments are reset, and the options of each that has any.

        Raises:
            ConfigError, UnknownTaskError: If an option is unknown or out of range.
        """
        options = dict(options or {})
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
        if self.suite is None or not options:
            return ids, {i: dict(options) for i in ids.tolist()} if options else {}
        others = {key: value for key, value in options.items() if key not in _OPTIONS}
        if others and self.plain:
            raise ConfigError(
                f"Unknown reset options {sorted(others)}: expected 'task_id', 'init_state_id', "
                "'reset_mask'."
            )
        per_env: dict[int, dict[str, Any]] = {i: dict(others) for i in ids.tolist()}
        suite = get_suite(self.suite)
        limits = {"task_id": len(suite.tasks), "init_state_id": suite.num_init_states}
        for key in _OPTIONS:
            if key in options:
                for i, value in self._option(key, options[key], limits[key], ids):
                    per_env[i][key] = value
        return ids, {i: found for i, found in per_env.items() if found}

    def _option(self, key: str, value: Any, limit: int, ids: np.ndarray) -> list[tuple[int, int]]:
        values = np.asarray(value)
        fits = values.shape in ((), (self.num_envs,)) and values.dtype.kind in "iu"
        values = np.broadcast_to(values, self.num_envs) if fits else values
        if not fits or (values[ids] < -1).any() or (values[ids] >= limit).any():
            raise ConfigError(
                f"Option {key!r} must be an integer, or one for each of the {self.num_envs} "
                f"environments, in 0..{limit - 1} or -1 for none; got {value!r}."
            )
        return [(i, int(values[i])) for i in ids.tolist() if values[i] >= 0]


def parse_autoreset_mode(value: AutoresetMode | str) -> AutoresetMode:
    """Return the autoreset mode of that name or value.

    Raises:
        ConfigError: If there is none.
    """
    if isinstance(value, AutoresetMode):
        return value
    for mode in AutoresetMode:
        if str(value) in (mode.value, mode.name) or str(value).upper() == mode.name:
            return mode
    names = ", ".join(mode.name for mode in AutoresetMode)
    raise ConfigError(f"autoreset_mode must be one of {names}; got {value!r}.")


def _build_from_factory(
    index: int,
    factory: Callable[[int], gym.Env[Any, Any]],
    wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]],
) -> gym.Env[Any, Any]:
    env = factory(index)
    for wrapper in wrappers:
        env = wrapper(env)
    return env


def _task_lists(
    suite: str, task_ids: int | str | Sequence[Any] | None, num_envs: int, group_size: int
) -> tuple[tuple[int, ...], ...]:
    found = get_suite(suite)
    nested = not isinstance(task_ids, str | int | np.integer | None) and any(
        isinstance(entry, Sequence | np.ndarray) and not isinstance(entry, str)
        for entry in task_ids
    )
    entries: Sequence[Any] = task_ids if nested else (task_ids,)  # type: ignore[assignment]
    lists = tuple(parse_tasks(found, entry) for entry in entries)
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
