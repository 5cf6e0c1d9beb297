"""Episodes that begin inside demonstrations: a reverse curriculum for what is never solved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
import numpy as np

from vla_gym.demos.files import DemoPath, read_paths
from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.state import EnvState
from vla_gym.errors import ConfigError
from vla_gym.suites.libero.spec import Layout

#: Of the stream that says where an episode begins, apart from the layouts' own.
_STREAM = 31


def read_starts(files: Mapping[Path, int]) -> dict[int, list[DemoPath]]:
    """Return the demonstrations in files of ``vla-gym demos``, by the number of their task.

    Raises:
        ConfigError: If a file is damaged.
    """
    found: defaultdict[int, list[DemoPath]] = defaultdict(list)
    for path, number in files.items():
        found[number] += read_paths(path)
    return dict(found)


class DemoStarts(gym.Wrapper[Any, np.ndarray, Any, np.ndarray]):
    """Begins a share of the episodes at a random moment of a demonstration (arXiv 1812.03381).

    Layouts and everything else stay as they are; which episodes, and where, depends on the
    environment's seed and the episode's number alone. The step limit counts from there, and
    ``info["demo_steps"]`` at the end of such an episode says how far in it began. A staged reward
    counts what the demonstration has achieved in the first step.
    """

    def __init__(
        self, env: gym.Env[Any, np.ndarray], demos: Mapping[int, Sequence[DemoPath]], share: float
    ) -> None:
        """Wrap a LiberoEnv.

        Args:
            env: The environment.
            demos: Of tasks by their numbers, see :func:`read_starts`; others begin as ever.
            share: Of the episodes of these tasks, in [0, 1].
        """
        super().__init__(env)
        self._demos, self._share = demos, share
        self._begun: int | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode, perhaps inside a demonstration.

        Raises:
            ConfigError: If the demonstration is of another scene.
        """
        obs, info = self.env.reset(seed=seed, options=options)
        base = cast(LiberoEnv, self.env.unwrapped)
        demos, self._begun = self._demos.get(info["task_id"]), None
        if demos is None or base.next_episode is None:
            return obs, info
        seed_now, episode, index = base.next_episode
        group_seed = seed_now - index % base.schedule.group_size  # a group begins alike
        rng = np.random.default_rng([group_seed, episode, _STREAM])
        if rng.random() >= self._share:
            return obs, info
        demo = demos[int(rng.integers(len(demos)))]
        self._begun = int(rng.integers(len(demo.actions)))
        sim: Any = base.sim
        nq, fixtures = len(sim.qpos), len(sim.task_model.fixtures)
        sizes = len(demo.state), len(demo.fixture_pos), len(demo.fixture_quat)
        if sizes != (1 + nq + len(sim.qvel), fixtures, fixtures):
            raise ConfigError(
                f"A demonstration of task {info['task_id']} was recorded in another scene (its "
                f"state and fixtures have sizes {sizes}): record it again with 'vla-gym demos'."
            )
        qpos, qvel = np.split(demo.state[1:], [nq])
        arm = qpos[sim.task_model.robot.joint_qpos]
        places = demo.fixture_pos, demo.fixture_quat
        sim.reset(Layout(qpos, qvel, float(demo.state[0]), *places, arm), settle=False)
        if self._begun:
            sim.run_chunk(demo.actions[: self._begun].astype(np.float64))
        return base.observe(), info

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step; the end of an episode that began inside a demonstration says so."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        if self._begun is not None and (terminated or truncated):
            info["demo_steps"] = self._begun
        return obs, reward, terminated, truncated, info

    def get_state(self) -> tuple[EnvState, int | None]:
        """Return the environment's state, and where in a demonstration the episode began."""
        return self.env.get_wrapper_attr("get_state")(), self._begun

    def set_state(self, state: tuple[EnvState, int | None]) -> Any:
        """Continue from what :meth:`get_state` returned; return the observation."""
        inner, self._begun = state
        return self.env.get_wrapper_attr("set_state")(inner)
