"""LIBERO's five suites and LIBERO-PRO's variants of four as plug-ins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_gym.assets import resolve_asset_pack
from vla_gym.suites.libero.model import TaskModel, check_objects, load_task_model
from vla_gym.suites.libero.spec import ACTION, CAMERAS, CONTROL_HZ, PROPRIO
from vla_gym.suites.libero.tasks import NUM_INIT_STATES, LiberoTask, libero_tasks
from vla_gym.suites.protocol import Suite

if TYPE_CHECKING:
    from vla_gym.sim.libero_sim import LiberoSim


class LiberoSuite(Suite):
    """One of LIBERO's suites."""

    num_init_states = NUM_INIT_STATES
    cameras = CAMERAS
    action = ACTION
    proprio = PROPRIO
    control_hz = CONTROL_HZ
    can_settle = True
    has_progress = True

    def __init__(self, name: str) -> None:
        """Name the suite, without the ``libero_`` prefix."""
        self.name = name

    @property
    def tasks(self) -> tuple[LiberoTask, ...]:
        """The tasks in the order of their ids."""
        return libero_tasks(self.name)

    def load_task_model(
        self, task: Any, assets: str | Path | None = None, *, clutter: bool = False
    ) -> TaskModel:
        """Load a task; ``assets`` is ``"lite"``, ``"libero"``, a path, or None for the default."""
        return load_task_model(task, assets, clutter=clutter)

    def check_assets(self, task: Any, assets: str | Path | None = None) -> None:
        """Check that a pack has the objects of a task."""
        check_objects(task, resolve_asset_pack(assets))

    def make_simulation(
        self, task_model: Any, physics: Any = "fast", observation_timing: Any = "libero", **how: Any
    ) -> LiberoSim:
        """Return a new simulation; ``how`` may hold ``settle_steps`` and ``settle_gripper``."""
        from vla_gym.sim.libero_sim import LiberoSim

        return LiberoSim(task_model, physics=physics, observation_timing=observation_timing, **how)
