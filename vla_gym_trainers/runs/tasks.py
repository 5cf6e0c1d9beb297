"""Options that say which tasks are played, in which world: the same for all trainers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_gym.envs.scene_cache import VisualProfile
from vla_gym.envs.settings import EnvSettings
from vla_gym.errors import ConfigError
from vla_gym.experts import EXPERT_TASKS
from vla_gym.outside import Count
from vla_gym.rollout import Start
from vla_gym.suites import Task, choose_suite, get_suite, get_task, suite_tasks
from vla_gym_trainers.runs.settings import TEST_SEED

#: Episodes of a task without official states, if the user does not say.
SAMPLED_EPISODES = 50


@dataclass(kw_only=True)
class TaskSettings(EnvSettings):
    """Tasks of one suite, and the machines that simulate them."""

    suite: str = "goal"
    """Suite name."""
    bddl_path: tuple[Path, ...] | None = None
    """In place of a suite: BDDL files of your own, or folders of them; see docs/environments.md."""
    task_ids: tuple[int, ...] | None = None
    """Tasks to train on; default: all of the suite."""
    workers: int | None = None
    """Worker processes of the environments; default: one a core (td3's single environment has
    none); 0: none."""
    hosts: str | None = None
    """ray, or ray://host:port: a part of the environments on each node of a Ray cluster."""
    visual_profile: VisualProfile | None = None
    """How the frames of training are drawn: libero, as upstream draws them; fast, without
    anti-aliasing and reflections; coarse, large meshes with fewer triangles as well; None: libero
    on LIBERO's own assets. Evaluations keep None."""

    def __post_init__(self) -> None:
        """Read the files of ``bddl_path``; they are the suite from then on."""
        if self.bddl_path:
            self.suite = str(choose_suite(None, self.bddl_path))
        self.bddl_path = None

    def tasks(self) -> tuple[int, ...]:
        """Return the tasks that are trained on."""
        if self.task_ids is not None:
            return self.task_ids
        return tuple(range(len(get_suite(self.suite).tasks)))

    def final_starts(self, count: int | None) -> list[Start]:
        """Return where the evaluations at the end begin, task after task, ``count`` of each.

        None: on all official states, or 50 sampled layouts.
        """
        suite = get_suite(self.suite)
        first_seed = None if suite.num_init_states else TEST_SEED
        states = range(count or suite.num_init_states or SAMPLED_EPISODES)
        return [
            Start.number(k, suite.name, i, None, first_seed) for i in self.tasks() for k in states
        ]

    def check_states(self, **counts: int | None) -> None:
        """Check that there are so many official states; layouts are sampled without end.

        Raises:
            ConfigError: If there are fewer.
        """
        states = get_suite(self.suite).num_init_states
        for name, count in counts.items():
            if states and (count or 0) > states:
                raise ConfigError(f"{name} must be at most {states}, got {count}.")

    def check_tasks(self) -> None:
        """Check tasks and world.

        Raises:
            ConfigError: If there is no task, or one is named twice; see ``check_env``.
            UnknownTaskError: If there is no such suite or task.
        """
        self.check_env()
        each_once("task_ids", self.tasks())
        for task_id in self.tasks():
            get_task(self.suite, task_id)


@dataclass(kw_only=True)
class SuitesSettings(EnvSettings):
    """Tasks of several suites."""

    suites: tuple[str, ...] = ("goal",)
    """Suites whose tasks are played."""
    task_ids: tuple[int, ...] | None = None
    """Tasks of each of these suites; None: all."""
    expert_episodes: Count = 4
    """Episodes a task of the scripted expert with noise, on sampled layouts."""
    hosts: str | None = None
    """ray, or ray://host:port: a part of the environments on each node of a Ray cluster."""

    def tasks(self) -> list[Task]:
        """Return the tasks in the order of suites and ids."""
        if self.task_ids is None:
            return [task for suite in self.suites for task in suite_tasks(suite)]
        return [get_task(suite, i) for suite in self.suites for i in self.task_ids]

    def check(self) -> None:
        """Check what needs the suites; not when the settings are made, as they may be a preset's.

        Raises:
            ConfigError: If there is no task, one is named twice, or one has no expert.
            UnknownTaskError: If there is no such suite or task.
        """
        self.check_env()
        keys = [task.key for task in self.tasks()]
        each_once("the tasks of suites and task_ids", keys)
        lacking = [t.key for t in self.tasks() if t.task_id not in EXPERT_TASKS.get(t.suite, ())]
        if self.expert_episodes and lacking:
            raise ConfigError(
                f"No expert plays {', '.join(lacking)}: set expert_episodes=0, or leave them out."
            )


def each_once(name: str, values: Sequence[Any]) -> None:
    """Check that there are values, none of them twice.

    Raises:
        ConfigError: If not.
    """
    if not values or len(set(values)) != len(values):
        raise ConfigError(f"{name} needs at least one value, each once; got {list(values)}.")
