"""Options of ``vla-gym demos``."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from vla_gym.envs.settings import EnvSettings
from vla_gym.errors import ConfigError
from vla_gym.experts import EXPERT_TASKS
from vla_gym.outside import Count, Fraction, PositiveInt
from vla_gym.suites import Task, get_task, suite_tasks


@dataclass
class DemosConfig(EnvSettings):
    """Record demonstrations of the scripted experts, or of a VLA, in LIBERO's HDF5 layout.

    They start from sampled layouts, never from the 50 official states. A run that was stopped goes
    on when the command is given again.
    """

    output: str = "demos"
    """Folder of the files, OUTPUT/libero_SUITE/TASK_demo.hdf5; finished ones are skipped."""
    suite: tuple[str, ...] = ("goal",)
    """One or several task suites."""
    task_ids: tuple[int, ...] | None = None
    """Tasks of each suite to record; None: all, of an expert those that he can do."""
    vla: str | None = None
    """Who acts in place of the experts: mini, mini-few, mini-flow, <backend>:/path?option=value, or
    a folder, such as the vla/ of a ppo or grpo run. What it succeeds in is recorded."""
    device: str = "cpu"
    """Torch device of that VLA."""
    num_demos: PositiveInt = 40
    """Successful episodes a task."""
    seed: Count = 0
    """Layouts and noise are a function of (seed, task, attempt), whatever the worker count."""
    noise: Fraction = 0.15
    """Noise on the executed actions (a normal episode's standard deviation, action units); the
    recorded action is always the undisturbed one of who acts."""
    image_size: Annotated[int, Meta(ge=16, le=1024)] = 128
    """Height and width of both cameras' images in pixels."""
    num_workers: Count | None = None
    """Processes, with hosts on each of them; None: one per core; 0: no subprocess."""
    num_envs: PositiveInt | None = None
    """Environments at once; None: one a process of this machine."""
    hosts: str | None = None
    """ray, or ray://host:port: a part of the environments on each node of a Ray cluster; all of
    them write to OUTPUT, which must be on a file system that they share."""
    overwrite: bool = False
    """Record again what exists."""
    lerobot: str | None = None
    """Also write all of these files as one LeRobotDataset into this new folder; needs lerobot."""
    lerobot_videos: bool = False
    """Its images as videos, with loss, in place of PNG."""

    def tasks(self) -> list[Task]:
        """Return the tasks to record, in the order of suites and ids, each once.

        Raises:
            ConfigError: A suite or task has no expert.
        """
        found = []
        for name in self.suite:
            known = [
                i
                for i, task in enumerate(suite_tasks(name))
                if self.vla is not None or task.task_id in EXPERT_TASKS.get(task.suite, ())
            ]
            if not known:
                raise ConfigError(
                    f"Suite {name!r} has no experts: expected one of {', '.join(EXPERT_TASKS)}."
                )
            ids = known if self.task_ids is None else self.task_ids
            found += [get_task(name, i) for i in ids]
            if unknown := [i for i in ids if i not in known]:
                raise ConfigError(
                    f"Tasks {unknown} of {name} have no expert: expected ids from {known}."
                )
        if not found:
            raise ConfigError("Expected at least one suite and task, got none.")
        return list(dict.fromkeys(found))

    def check(self) -> None:
        """Check the values; not when they are made, so that the command line says it in one line.

        Raises:
            ConfigError: A value is out of range or a task has no expert.
        """
        self.tasks()
        self.check_env()
        if self.lerobot is None:
            if self.lerobot_videos:
                raise ConfigError("lerobot_videos needs lerobot: the folder of the dataset.")
        elif Path(self.lerobot).expanduser().exists():
            raise ConfigError(f"{self.lerobot} exists: lerobot must be the name of a new folder.")
        elif find_spec("lerobot") is None:
            raise ConfigError(
                "A LeRobotDataset is written by lerobot, which is not installed here: see "
                "docs/libraries.md for how, then give the same command again."
            )
