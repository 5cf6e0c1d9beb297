"""Saved environments and what wrappers keep of them: episodes go on in another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vla_gym.errors import ConfigError

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


@dataclass(frozen=True, eq=False)
class WrapperState:
    """A saved environment with what a wrapper keeps of its running episode; picklable.

    Attributes:
        env: State of the wrapped environment.
        wrapper: Name of the wrapper's class.
        kept: What it keeps, by name.
        ended: Whether the next step of a vector environment resets it (NEXT_STEP).
    """

    env: Any
    wrapper: str
    kept: Mapping[str, Any]
    ended: bool = False


def check_wrapper(state: Any, wrapper: str) -> WrapperState:
    """Return a state if a wrapper of this class has saved it.

    Raises:
        ConfigError: If not.
    """
    if not isinstance(state, WrapperState) or state.wrapper != wrapper:
        raise ConfigError(
            f"Expected a state of {wrapper}, got {getattr(state, 'wrapper', type(state).__name__)}:"
            f" it must come from an environment that is wrapped in {wrapper} at the same place."
        )
    return state
