"""What a suite of tasks offers: all that environments, workers and wrappers ask of a benchmark.

Sizes of actions and proprioception, cameras and the number of official initial states are read from
the :class:`Suite` and stand nowhere else. :mod:`vla_gym.suites.libero` is the first one;
docs/extending.md tells how a package adds its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vla_gym.assets.pack import AssetPack


@dataclass(frozen=True)
class ActionSpec:
    """What one action (one control step) is.

    Attributes:
        names: One word an entry, e.g. ``("x", "y", "z", "roll", "pitch", "yaw", "gripper")``.
        noop: The action that leaves the robot where it is.
        low, high: Bounds of every entry.
        scale: Natural size of every entry, by which trainers scale exploration noise, corrections
            and distances; it limits nothing. None for 1.
    """

    names: tuple[str, ...]
    noop: tuple[float, ...]
    low: float = -1.0
    high: float = 1.0
    scale: tuple[float, ...] | None = None

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(self.names)

    @property
    def scales(self) -> tuple[float, ...]:
        """Natural size of every entry, 1 where none is given."""
        return self.scale or (1.0,) * self.size


@dataclass(frozen=True)
class ProprioSpec:
    """What ``proprio`` holds.

    Attributes:
        parts: Name and number of entries of each part, in order, e.g. ``(("eef_pos", 3), ...)``.
    """

    parts: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return sum(size for _, size in self.parts)


@dataclass(frozen=True)
class Task:
    """One task of a suite; suites add what their compiler needs.

    Attributes:
        suite: Name of its suite.
        task_id: Its index in the suite.
        name: Name in the benchmark.
        instruction: What the policy is told.
        max_control_steps: Step limit of an episode in control steps.
        scene_name: Name of the scene; tasks of one scene share a compiled model.
        objects, fixtures: Names of the movable objects, and of furniture and devices, for
            listings.
        goal: The goal in the benchmark's words, for listings.
        facts: What infos and result cards say of it beside suite and number.
    """

    suite: str
    task_id: int
    name: str
    instruction: str
    max_control_steps: int
    scene_name: str

    @property
    def key(self) -> str:
        """Short name that no other task has, e.g. ``"goal_8"``."""
        return f"{self.suite}_{self.task_id}"

    @property
    def objects(self) -> tuple[str, ...]:
        """See the class."""
        return ()

    @property
    def fixtures(self) -> tuple[str, ...]:
        """See the class."""
        return ()

    @property
    def goal(self) -> str:
        """See the class."""
        return self.instruction

    @property
    def facts(self) -> Mapping[str, str]:
        """See the class."""
        return {}


@dataclass(frozen=True, eq=False)
class CompiledTask(ABC):
    """A task that is ready to be simulated: plain data, loaded once a process.

    A layout is a start of an episode: an object with an ``init_state_id`` (-1 if it was sampled);
    what else it holds is between a suite's task model and its simulation.

    Attributes:
        task: Which task.
        assets: The asset pack that it was compiled from.
        scene_key: Name of the compiled scene; tasks with the same key share one model.
        mjb_path: The compiled model, verified when this object was made.
        clutter: Bodies of the scene's clutter by category; empty without.
    """

    task: Task
    assets: AssetPack
    scene_key: str
    mjb_path: Path
    clutter: Mapping[str, str]

    @abstractmethod
    def official_layout(self, init_state_id: int) -> Any:
        """Return one of the official initial states."""

    @abstractmethod
    def sample_layout(self, rng: np.random.Generator) -> Any:
        """Draw a fresh layout by the benchmark's rules."""


class Simulation(Protocol):
    """The simulation of one task at a time; those of one scene may share a model.

    Renderers use ``task_model`` and ``prepare_render`` (see ``vla_gym.sim``).
    """

    @property
    def task_model(self) -> CompiledTask:
        """The task that is played."""

    @property
    def data(self) -> Any:
        """The ``mujoco.MjData``, read only."""

    @property
    def variation(self) -> np.ndarray | None:
        """What the scene looks like, see ``DomainVariation.describe``; None: as it is."""

    def set_task(self, task_model: Any) -> None:
        """Play another task of the same scene from now on."""

    def reset(self, layout: Any) -> None:
        """Start an episode from a layout and let it settle."""

    def run_chunk(self, actions: np.ndarray) -> tuple[int, bool]:
        """Execute control steps until the goal is reached or the chunk ends.

        Args:
            actions: (C, action size).

        Returns:
            The number of control steps executed, and whether the goal is reached after the last.
        """

    def proprio(self) -> np.ndarray:
        """Return (proprio size,) float32, in new memory."""

    def success(self) -> bool:
        """Return whether the task's goal holds now."""

    def get_state(self) -> Any:
        """Return all that the future depends on; picklable, with the attribute ``scene_key``."""

    def set_state(self, snapshot: Any) -> None:
        """Continue from what :meth:`get_state` returned."""

    def set_variation(self, vector: np.ndarray | None) -> None:
        """Give the scene another look; None for the benchmark's own, all that some suites know."""

    def place_distractors(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw where clutter stands; asked of scenes with clutter only."""

    def prepare_render(self) -> Any:
        """Write what is this simulation's own into the shared model; the renderer has its lock.

        Returns:
            The ``mujoco.MjData`` to draw: body, camera and light poses are read from it.
        """


class Suite(ABC):
    """Tasks that share robot, cameras, actions and proprioception.

    Attributes:
        name: Its name, e.g. ``"goal"``; environments are called ``Libero-<name>-v0``.
        tasks: The tasks in the order of their ids.
        num_init_states: Number of official initial states of every task; 0: episodes begin at
            sampled layouts only.
        cameras: Key in the observation -> name in the model; the first is the main view.
        action: What an action is.
        proprio: What proprioception holds.
        control_hz: Control steps in a second of simulated time.
        can_settle: Whether ``make_simulation`` also takes ``settle_steps`` and ``settle_gripper``.
        has_progress: Whether simulations have ``progress()``: the share of the goal's conditions
            that hold now, a float in [0, 1], 1 exactly where ``success()`` is true.
    """

    name: str
    num_init_states: int
    cameras: Mapping[str, str]
    action: ActionSpec
    proprio: ProprioSpec
    control_hz: float
    can_settle: bool = False
    has_progress: bool = False

    @property
    @abstractmethod
    def tasks(self) -> Sequence[Task]:
        """See the class."""

    @abstractmethod
    def load_task_model(
        self, task: Any, assets: str | Path | None = None, *, clutter: bool = False
    ) -> CompiledTask:
        """Return a task that is ready to be simulated, compiling its scene first if necessary.

        Args:
            task: One of :attr:`tasks`.
            assets: Which of the suite's asset packs: a name, the path of one, or None for the
                default.
            clutter: With clutter in the scene, hidden until it is placed.

        Raises:
            AssetError: If the asset pack is missing or not one.
            CompileError: If the scene cannot be compiled.
            ConfigError: If the suite has no clutter.
        """

    def check_assets(self, task: Any, assets: str | Path | None = None) -> None:  # noqa: B027
        """Check before anything is played that an asset pack has what a task needs.

        Raises:
            AssetError: If not. A suite with one pack has nothing to check.
        """

    @abstractmethod
    def make_simulation(
        self, task_model: Any, physics: str = "fast", observation_timing: str = "libero"
    ) -> Simulation:
        """Return a new simulation.

        Args:
            task_model: What :meth:`load_task_model` returned.
            physics: ``"fast"``, or ``"exact"``: the benchmark's arithmetic bit for bit.
            observation_timing: ``"libero"``: observations of the moment that the benchmark's own
                environment returns; ``"end"``: of a control step's end.

        Raises:
            ConfigError: If the suite does not know that arithmetic.
        """
