"""Play one noisy expert episode and record what a policy would see, with the clean labels."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vla_gym.experts.registry import make_expert
from vla_gym.sim import LiberoSim
from vla_gym.sim.access import EEF_BODY
from vla_gym.suites.libero import TaskModel

# Frames recorded after the goal is reached: the policy also sees how a finished task looks.
SUCCESS_TAIL = 4
# Up to so many random actions move the arm before the recording begins.
MAX_JIGGLE_STEPS = 5
JIGGLE_STD = np.array([0.5, 0.5, 0.5, 0.1, 0.1, 0.1])
# One episode is nearly clean, one normal, one rough: the cloned policy sees all three.
NOISE_SCALES = (0.3, 1.0, 1.6)
BIAS_PERIOD = 12
BIAS_STD = 0.6 * np.array([1.0, 1.0, 1.0, 0.15, 0.15, 0.15])
WHITE_STD = np.array([1.0, 1.0, 1.0, 0.2, 0.2, 0.2])
_FRAME_ARRAYS = (
    "images",
    "proprio",
    "actions",
    "executed_actions",
    "states",
    "joints",
    "eef_quat",
)


class ActionNoise:
    """Disturbs executed actions so that demonstrations show the way back (as in DART).

    A bias drawn anew every 12 steps drifts the arm off its path, white noise shakes it. Only what
    is executed is disturbed; the recorded label stays the expert's own action for that state.
    """

    def __init__(self, scale: float, rng: np.random.Generator) -> None:
        """Draw the episode's strength.

        Args:
            scale: Standard deviation of a normal episode's translation noise, in action units.
            rng: Source of all noise of this episode.
        """
        self._rng = rng
        self._scale = scale * float(rng.choice(NOISE_SCALES))
        self._bias = np.zeros(6)
        self._step = 0

    def __call__(self, action: np.ndarray) -> np.ndarray:
        """Return the disturbed action (7,); the gripper command is kept."""
        if self._step % BIAS_PERIOD == 0:
            self._bias = self._rng.normal(0.0, self._scale, 6) * BIAS_STD
        self._step += 1
        noisy = np.array(action, dtype=np.float64)
        noisy[:6] += self._bias + self._rng.normal(0.0, self._scale, 6) * WHITE_STD
        return np.clip(noisy, -1.0, 1.0)


@dataclass(frozen=True)
class Episode:
    """One successful episode, T frames; frame t is what was there before action t.

    Attributes:
        images: (T, K, S, S, 3) uint8, agentview then wrist.
        proprio: (T, 8) float32, as ``LiberoSim.proprio``.
        actions: (T, 7) float32, the expert's clean action at each frame.
        executed_actions: (T, 7) float32, what was executed: the action with noise.
        states: (T, 1 + nq + nv) float64: time, qpos, qvel.
        joints: (T, 7) float64, positions of the arm's joints in radians.
        eef_quat: (T, 4) float64, the hand's orientation (x, y, z, w), as robosuite writes it.
        fixture_pos, fixture_quat: (F, 3) and (F, 4), in the order of ``TaskModel.fixtures``.
        success_step: Number of the first action that reached the goal, from 0.
    """

    images: np.ndarray
    proprio: np.ndarray
    actions: np.ndarray
    executed_actions: np.ndarray
    states: np.ndarray
    joints: np.ndarray
    eef_quat: np.ndarray
    fixture_pos: np.ndarray
    fixture_quat: np.ndarray
    success_step: int

    def __len__(self) -> int:
        """Return T."""
        return len(self.actions)


def episode_rng(seed: int, task_model: TaskModel, attempt: int) -> np.random.Generator:
    """Return the generator of one attempt: a function of (seed, task, attempt) alone."""
    task = task_model.task
    return np.random.default_rng([seed, zlib.crc32(task.suite.encode()), task.task_id, attempt])


def record_episode(
    sim: LiberoSim,
    render: Callable[[], np.ndarray],
    rng: np.random.Generator,
    *,
    noise: float,
    max_steps: int | None = None,
) -> Episode | None:
    """Play one episode from a freshly sampled layout.

    Args:
        sim: Simulation of the task; it is reset here.
        render: Returns the present images (K, S, S, 3) uint8; a new array each call.
        rng: Source of the layout and of all noise.
        noise: See :class:`ActionNoise`; 0 records the expert undisturbed.
        max_steps: Step limit; None: the task's own.

    Returns:
        The episode, or None if the expert did not reach the goal.
    """
    sim.reset(sim.task_model.sample_layout(rng))
    if noise > 0.0:
        _jiggle(sim, rng)
    disturb = ActionNoise(noise, rng)
    expert = make_expert(sim)
    frames: dict[str, list[np.ndarray]] = {name: [] for name in _FRAME_ARRAYS}
    snapshot = sim.get_state()
    reached_at: int | None = None
    for step in range(max_steps or sim.task_model.task.max_control_steps):
        action = expert.act()
        executed = disturb(action)
        for name, value in zip(
            _FRAME_ARRAYS,
            (render(), sim.proprio(), action, executed, *_mechanics(sim)),
            strict=True,
        ):
            frames[name].append(value)
        if sim.step(executed) and reached_at is None:
            reached_at = step
        if reached_at is not None and step >= reached_at + SUCCESS_TAIL:
            break
    if reached_at is None:
        return None
    arrays = {name: np.stack(values) for name, values in frames.items()}
    for name in ("actions", "executed_actions"):
        arrays[name] = arrays[name].astype(np.float32)
    return Episode(
        **arrays,
        fixture_pos=snapshot.fixture_pos,
        fixture_quat=snapshot.fixture_quat,
        success_step=reached_at,
    )


def _mechanics(sim: LiberoSim) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the state (1 + nq + nv,), the arm's joints (7,) and the hand's quaternion (4,)."""
    data, qpos = sim.data, sim.qpos
    state = np.concatenate([[data.time], qpos, sim.qvel])
    return state, qpos[sim.task_model.robot.joint_qpos], np.roll(data.body(EEF_BODY).xquat, -1)


def _jiggle(sim: LiberoSim, rng: np.random.Generator) -> None:
    for _ in range(int(rng.integers(0, MAX_JIGGLE_STEPS + 1))):
        sim.step(np.clip(np.append(rng.normal(0.0, JIGGLE_STD), -1.0), -1.0, 1.0))
