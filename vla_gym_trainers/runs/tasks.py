"""Options that say which tasks are played, in which world: the same for all trainers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vla_gym.envs.settings import EnvSettings
from vla_gym.errors import ConfigError
from vla_gym.experts import EXPERT_TASKS
from vla_gym.suites import Task, get_suite, get_task, suite_tasks


@dataclass(kw_only=True)
class TaskSettings(EnvSettings):
    """Tasks of one suite, and the machines that simulate them."""

    suite: str = "goal"
    """Suite name."""
    task_ids: tuple[int, ...] | None = None
    """Tasks to train on; default: all of the suite."""
    workers: int | None = None
    """Worker processes of the environments; default: one a core (td3's single environment has
    none); 0: none."""
    hosts: str | None = None
    """ray, or ray://host:port: a part of the environments on each node of a Ray cluster."""

    def tasks(self) -> tuple[int, ...]:
        """Return the tasks that are trained on."""
        if self.task_ids is not None:
            return self.task_ids
        return tuple(range(len(get_suite(self.suite).tasks)))

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

    def tasks(self) -> list[Task]:
        """Return the tasks in the order of suites and ids."""
        if self.task_ids is None:
            return [task for suite in self.suites for task in suite_tasks(suite)]
        return [get_task(suite, i) for suite in self.suites for i in self.task_ids]

    def check_tasks(self, *, need_expert: bool) -> None:
        """Check tasks and world.

        Args:
            need_expert: Whether the scripted expert plays them.

        Raises:
            ConfigError: If there is no task, one is named twice, or one has no expert.
            UnknownTaskError: If there is no such suite or task.
        """
        self.check_env()
        keys = [task.key for task in self.tasks()]
        each_once("the tasks of suites and task_ids", keys)
        lacking = [t.key for t in self.tasks() if t.task_id not in EXPERT_TASKS.get(t.suite, ())]
        if need_expert and lacking:
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
