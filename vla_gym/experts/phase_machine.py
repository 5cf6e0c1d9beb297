"""Phase machine: an expert is a list of end-effector targets that are followed one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.experts.geometry import GRIPPER_DOWN, axis_angle
from vla_gym.suites.libero.spec import ACTION

if TYPE_CHECKING:
    from vla_gym.sim import LiberoSim

OPEN, CLOSED = -1.0, 1.0

# What action 1.0 means to the OSC_POSE controller (RobotSpec.position_scale, rotation_scale).
POSITION_SCALE = 0.05
ROTATION_SCALE = 0.5
# Proportional gain of the expert on the remaining error: 2 moves at full speed until 2.5 cm
# before the target and reaches it without overshoot.
GAIN = 2.0
MAX_RETRIES = 5

Vector = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Phase:
    """One target of the end effector and the rule for leaving it.

    A phase ends when position (and rotation) are within tolerance after ``min_steps``, or at
    ``max_steps`` whatever the error.

    Attributes:
        name: Unique within one expert; a later phase may jump back to it.
        target: Called every step for the wanted grip-site position (3,), world frame.
        rotation: Wanted (3, 3) orientation of the grip site.
        gripper: ``OPEN`` or ``CLOSED``.
        tolerance: Distance to the target that counts as reached, metres.
        rotation_tolerance: Angle that counts as reached, radians; None: not looked at.
        min_steps, max_steps: Control steps.
        speed: Largest norm of the translation action; 1.0 is about 0.3 m/s.
        turn_speed: Largest norm of the rotation action; 1.0 is about 3 rad/s.
        check: Called when the phase ends; False starts again at ``retry_from``.
        guard: Called every step; False starts again at ``retry_from`` at once.
        retry_from: Name of the phase to go back to when ``check`` or ``guard`` fails.
        on_enter: Called when the phase begins.
    """

    name: str
    target: Vector
    rotation: np.ndarray = field(default_factory=GRIPPER_DOWN.copy)
    gripper: float = OPEN
    tolerance: float = 0.012
    rotation_tolerance: float | None = None
    min_steps: int = 1
    max_steps: int = 60
    speed: float = 1.0
    turn_speed: float = 0.5
    check: Callable[[], bool] | None = None
    guard: Callable[[], bool] | None = None
    retry_from: str | None = None
    on_enter: Callable[[], None] | None = None


def hold(
    name: str, target: Vector, steps: int, gripper: float, rotation: np.ndarray, speed: float = 0.5
) -> Phase:
    """Return a phase that stays at a target for exactly ``steps`` control steps."""
    return Phase(
        name,
        target,
        rotation,
        gripper,
        tolerance=np.inf,
        min_steps=steps,
        max_steps=steps,
        speed=speed,
    )


class Expert:
    """Feedback policy on privileged state: follows a list of phases, repeats failed ones.

    The expert looks at the live simulation in every call, so it may be called after foreign
    actions too (noise, a chunk of another policy); its action is then the way back.
    """

    def __init__(self, sim: LiberoSim, phases: Sequence[Phase]) -> None:
        """Start at the first phase.

        Args:
            sim: Simulation in the state from which the expert begins.
            phases: At least one; the last one is held for ever.

        Raises:
            ConfigError: If there is no phase, a name occurs twice or a retry goes nowhere.
        """
        self._sim = sim
        self._phases = tuple(phases)
        self._index_of = {phase.name: i for i, phase in enumerate(self._phases)}
        if not self._phases or len(self._index_of) != len(self._phases):
            raise ConfigError(
                "An expert needs at least one phase and unique phase names, got "
                f"{[phase.name for phase in self._phases]}."
            )
        for phase in self._phases:
            if (phase.check or phase.guard) and phase.retry_from is None:
                raise ConfigError(f"Phase {phase.name!r} has a check but no retry_from.")
            if phase.retry_from is not None and phase.retry_from not in self._index_of:
                raise ConfigError(
                    f"Phase {phase.name!r} retries from unknown phase {phase.retry_from!r}: "
                    f"expected one of {list(self._index_of)}."
                )
        self.retries = 0  # how often a check has failed so far
        self._enter(0)

    @property
    def phase(self) -> str:
        """Name of the current phase."""
        return self._phases[self._index].name

    def act(self) -> np.ndarray:
        """Return the action (7,) float64 for the simulation's present state.

        Translation (3) and rotation (3) deltas in controller units, then the gripper
        (-1 open, +1 closed); all within [-1, 1].
        """
        position, rotation = self._sim.eef_pose()
        # Every pass moves the machine on by one phase; the bound only guards against a list of
        # phases that are all reached at once and jump back for ever.
        for _ in range(len(self._phases) * (MAX_RETRIES + 1) + 1):
            phase = self._phases[self._index]
            position_error = np.asarray(phase.target(), dtype=np.float64) - position
            rotation_error = axis_angle(phase.rotation @ rotation.T)
            last = self._index == len(self._phases) - 1
            if self._fails(phase.guard):
                self._retry(phase)
            elif last or not self._finished(phase, position_error, rotation_error):
                break
            elif self._fails(phase.check):
                self._retry(phase)
            else:
                self._enter(self._index + 1)
        self._steps_in_phase += 1
        action = np.empty(ACTION.size)
        action[:3] = _limit_norm(position_error * (GAIN / POSITION_SCALE), phase.speed)
        action[3:6] = _limit_norm(rotation_error * (GAIN / ROTATION_SCALE), phase.turn_speed)
        action[6] = phase.gripper
        return action

    def _finished(
        self, phase: Phase, position_error: np.ndarray, rotation_error: np.ndarray
    ) -> bool:
        if self._steps_in_phase >= phase.max_steps:
            return True
        if self._steps_in_phase < phase.min_steps:
            return False
        if np.linalg.norm(position_error) >= phase.tolerance:
            return False
        limit = phase.rotation_tolerance
        return limit is None or bool(np.linalg.norm(rotation_error) < limit)

    def _fails(self, test: Callable[[], bool] | None) -> bool:
        return test is not None and self.retries < MAX_RETRIES and not test()

    def _retry(self, phase: Phase) -> None:
        assert phase.retry_from is not None
        self.retries += 1
        self._enter(self._index_of[phase.retry_from])

    def _enter(self, index: int) -> None:
        self._index = index
        self._steps_in_phase = 0
        on_enter = self._phases[index].on_enter
        if on_enter is not None:
            on_enter()


def _limit_norm(vector: np.ndarray, limit: float) -> np.ndarray:
    norm = float(np.linalg.norm(vector))
    return vector * (limit / norm) if norm > limit else vector
