"""What a suite of tasks offers: all that environments, workers and wrappers ask of a benchmark.

A suite is an object with the attributes of :class:`Suite`; nothing needs to be inherited. Sizes of
actions and proprioception, cameras and the number of official initial states are read from it and
stand nowhere else. :mod:`vla_gym.suites.libero` is the first one; docs/environments.md tells how a
package adds its own.
"""

from __future__ import annotations

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
    """

    names: tuple[str, ...]
    noop: tuple[float, ...]
    low: float = -1.0
    high: float = 1.0

    @property
    def size(self) -> int:
        """Number of entries."""
        return len(self.names)


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


class Task(Protocol):
    """One task of a suite; hashable, and equal to another one of the same content."""

    @property
    def suite(self) -> str:
        """Name of its suite."""

    @property
    def task_id(self) -> int:
        """Its index in the suite."""

    @property
    def name(self) -> str:
        """Name in the benchmark."""

    @property
    def key(self) -> str:
        """Short name that no other task has, e.g. ``"goal_8"``."""

    @property
    def instruction(self) -> str:
        """What the policy is told."""

    @property
    def max_control_steps(self) -> int:
        """Step limit of an episode in control steps."""

    @property
    def scene_name(self) -> str:
        """Name of the scene; tasks of one scene share a compiled model."""

    @property
    def objects(self) -> tuple[str, ...]:
        """Names of the movable objects, for listings."""

    @property
    def fixtures(self) -> tuple[str, ...]:
        """Names of furniture and devices, for listings."""

    @property
    def goal(self) -> str:
        """The goal in the benchmark's words, for listings."""


class Layout(Protocol):
    """A start of an episode; what it holds is between a suite's task model and its simulation."""

    @property
    def init_state_id(self) -> int:
        """Index of the official initial state, or -1 for a sampled layout."""


class CompiledTask(Protocol):
    """A task that is ready to be simulated: plain data that is loaded once a process."""

    @property
    def task(self) -> Any:
        """The :class:`Task`."""

    @property
    def assets(self) -> AssetPack:
        """The asset pack that it was compiled from."""

    @property
    def scene_key(self) -> str:
        """Name of the compiled scene; tasks with the same key share one model."""

    @property
    def mjb_path(self) -> Path:
        """The compiled model, verified."""

    @property
    def clutter(self) -> Mapping[str, str]:
        """Bodies of the scene's clutter by category; empty without."""

    def official_layout(self, init_state_id: int) -> Any:
        """Return one of the official initial states, a :class:`Layout`."""

    def sample_layout(self, rng: np.random.Generator) -> Any:
        """Draw a fresh :class:`Layout` by the benchmark's rules."""


class Simulation(Protocol):
    """The simulation of one task at a time; those of one scene may share a model.

    Renderers use ``data``, ``task_model`` and ``prepare_render`` (see ``vla_gym.sim``).
    """

    @property
    def task_model(self) -> Any:
        """The :class:`CompiledTask` that is played."""

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

    def run_chunk(self, actions: np.ndarray, max_steps: int | None = None) -> tuple[int, bool]:
        """Execute control steps until the goal is reached or the chunk ends.

        Args:
            actions: (C, action size).
            max_steps: Execute at most this many of them, at least 1.

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

    def prepare_render(self) -> None:
        """Write what is this simulation's own into the shared model; the renderer has its lock."""


class Suite(Protocol):
    """Tasks that share robot, cameras, actions and proprioception."""

    @property
    def name(self) -> str:
        """Its name, e.g. ``"goal"``; environments are called ``Libero-<name>-v0``."""

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks in the order of their ids."""

    @property
    def num_init_states(self) -> int:
        """Number of official initial states of every task."""

    @property
    def cameras(self) -> Mapping[str, str]:
        """Cameras: key in the observation -> name in the model; the first is the main view."""

    @property
    def action(self) -> ActionSpec:
        """What an action is."""

    @property
    def proprio(self) -> ProprioSpec:
        """What proprioception holds."""

    @property
    def control_hz(self) -> float:
        """Control steps in a second of simulated time."""

    def load_task_model(
        self, task: Any, assets: str | Path = "lite", *, clutter: bool = False
    ) -> Any:
        """Return a :class:`CompiledTask`, compiling its scene first if necessary.

        Args:
            task: One of :attr:`tasks`.
            assets: Which of the suite's asset packs: a name, or the path of one.
            clutter: With clutter in the scene, hidden until it is placed.

        Raises:
            AssetError: If the asset pack is missing or not one.
            CompileError: If the scene cannot be compiled.
            ConfigError: If the suite has no clutter.
        """

    def make_simulation(self, task_model: Any, physics: str = "fast") -> Any:
        """Return a new :class:`Simulation`.

        Args:
            task_model: What :meth:`load_task_model` returned.
            physics: ``"fast"``, or ``"exact"``: the benchmark's arithmetic bit for bit.

        Raises:
            ConfigError: If the suite does not know that arithmetic.
        """
