"""Noisy episodes from sampled layouts: the data of demonstrations and of the RL token."""

from __future__ import annotations

import zlib
from typing import Any

import gymnasium as gym
import numpy as np

from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.schedule import TaskSchedule
from vla_gym.errors import ConfigError
from vla_gym.suites import get_task

# Up to so many random actions move the arm before an expert begins.
MAX_JIGGLE_STEPS = 5
JIGGLE_STD = np.array([0.5, 0.5, 0.5, 0.1, 0.1, 0.1])
# One episode is nearly clean, one normal, one rough: the cloned policy sees all three.
NOISE_SCALES = (0.3, 1.0, 1.6)
BIAS_PERIOD = 12
BIAS_STD = 0.6 * np.array([1.0, 1.0, 1.0, 0.15, 0.15, 0.15])
WHITE_STD = np.array([1.0, 1.0, 1.0, 0.2, 0.2, 0.2])

_Env = gym.Env[dict[str, Any], np.ndarray]


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
        """Return the disturbed action (7,); the gripper command is kept.

        Raises:
            ConfigError: If a robot with other actions is to be disturbed.
        """
        noisy = np.array(action, dtype=np.float64)
        if self._scale == 0.0:
            return np.clip(noisy, -1.0, 1.0)
        if noisy.shape != (7,):
            raise ConfigError(
                f"Noise is for actions of 7 numbers, got {noisy.shape}: give noise 0."
            )
        if self._step % BIAS_PERIOD == 0:
            self._bias = self._rng.normal(0.0, self._scale, 6) * BIAS_STD
        self._step += 1
        noisy[:6] += self._bias + self._rng.normal(0.0, self._scale, 6) * WHITE_STD
        return np.clip(noisy, -1.0, 1.0)


class NoisyEpisodes(gym.Wrapper[dict[str, Any], np.ndarray, dict[str, Any], np.ndarray]):
    """Plays noisy episodes from sampled layouts, numbered by the seeds of resets.

    ``reset(seed=n, options={"task_id": t})`` plays episode n of task t. Layout, noise and the
    scene's look are a function of (seed, task, n) alone.
    """

    def __init__(self, env: _Env, *, seed: int, noise: float, expert: bool = True) -> None:
        """Wrap an environment.

        Args:
            env: Around a ``LiberoEnv``.
            seed: Of all episodes.
            noise: See :class:`ActionNoise`; 0 disturbs nothing.
            expert: The scripted expert acts, and with noise some random actions come before the
                first observation. False: what is executed are the actions given, with noise.
        """
        super().__init__(env)
        base = env.unwrapped
        assert isinstance(base, LiberoEnv)
        self._base, self._seed, self._noise, self._by_expert = base, seed, noise, expert
        base.schedule = self._layouts = _Layouts(base.schedule)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start episode number ``seed`` of the task that the options name."""
        from vla_gym.experts import make_expert

        assert seed is not None and options, "expected the episode's number and its task"
        base = self._base
        task = get_task(base.suite, int(options["task_id"]))
        suite = zlib.crc32(task.suite.encode())
        rng = np.random.default_rng([self._seed, suite, task.task_id, seed])
        self._layouts.rng = rng
        base.seek(self._seed, seed)
        obs, info = self.env.reset(options=options)
        if self._by_expert and self._noise > 0.0:
            for _ in range(int(rng.integers(0, MAX_JIGGLE_STEPS + 1))):
                base.sim.step(np.clip(np.append(rng.normal(0.0, JIGGLE_STD), -1.0), -1.0, 1.0))
            obs = base.observe()
        self._disturb = ActionNoise(self._noise, rng)
        self._expert = make_expert(base.sim) if self._by_expert else None
        base.replace_action = self.choose
        return obs, info

    def choose(self, action: np.ndarray) -> np.ndarray:
        """Return the action (7,) that is executed; called before each control step."""
        if self._expert is not None:
            action = self._expert.act()
        executed = self._disturb(action)
        self.on_action(action, executed)
        return executed

    def on_action(self, action: np.ndarray, executed: np.ndarray) -> None:
        """Do nothing; recorders keep the moment, the clean action and the executed one."""


class _Layouts(TaskSchedule):
    """Draws the next layout from a generator that it is given."""

    def __init__(self, schedule: TaskSchedule) -> None:
        super().__init__(schedule.task_ids)
        self.rng = np.random.default_rng(0)

    def task_and_rng(
        self, seed: int, episode: int, env_index: int | None = None
    ) -> tuple[int, int, np.random.Generator]:
        """Return a task (an option overrides it), the seed and the generator."""
        del episode, env_index
        return self.task_ids[0], seed, self.rng
