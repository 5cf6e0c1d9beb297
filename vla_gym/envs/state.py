"""A saved environment: an episode that can go on in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vla_gym.sim.snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class EnvState:
    """Everything that the future of a ``LiberoEnv`` depends on; picklable.

    It is never changed after it was made, so one state may be restored any number of times. What
    is set when an environment is made (asset pack, physics, chunk length, step limit, discount,
    cameras and their timing, settling, tasks and their sampling, how scenes vary) is not part of
    it: the environment that goes on must agree in these, but not in its number in a vector env. The
    look that this episode has is part of it, in ``snapshot``.

    Attributes:
        suite: Suite of the task, e.g. ``"goal"``.
        task_id: Index of the task in that suite.
        physics: ``"fast"`` or ``"exact"``: the arithmetic that the episode has been played with.
        snapshot: The simulation; it names its scene, and so the asset pack.
        elapsed_steps: Control steps of the episode so far.
        needs_reset: Whether the episode is over.
        init_state_id: Official initial state that the episode began with, or -1.
        seed: Seed of the environment.
        next_episode: Number of the episode of that seed that the next reset without a seed plays.
        env_index: Number of the environment whose schedule the next episodes follow.
        clutter: Whether the scene is one with clutter.
    """

    suite: str
    task_id: int
    physics: str
    snapshot: Snapshot
    elapsed_steps: int
    needs_reset: bool
    init_state_id: int
    seed: int
    next_episode: int
    env_index: int
    clutter: bool = False
