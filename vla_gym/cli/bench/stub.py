"""Environments without a simulation: what remains is the cost of the vector environment itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.cli.bench.drivers import VectorDriver, in_chunks
from vla_gym.cli.bench.spec import Contender

#: Seconds of work a step, enough that workers overlap and little beside a real chunk.
WORK_S = 5e-4


class StubEnv(gym.Env[dict[str, Any], np.ndarray]):
    """Spaces and infos of :class:`vla_gym.envs.libero.LiberoEnv`; a step computes for a fixed time.

    Attributes:
        image_out: As in ``LiberoEnv``: where the images go.
    """

    metadata: dict[str, Any] = {"render_modes": []}

    def __init__(self, chunk_len: int, image_size: int, work_s: float = WORK_S) -> None:
        """Create the environment.

        Args:
            chunk_len: Rows of an action.
            image_size: Height and width of two images, 0 for none.
            work_s: Seconds that a step keeps its core busy.
        """
        self.cameras = ("agentview", "wrist") if image_size else ()
        self.image_out: dict[str, np.ndarray] | None = None
        image = (image_size, image_size, 3)
        self.observation_space = spaces.Dict(
            {
                **{camera: spaces.Box(0, 255, image, np.uint8) for camera in self.cameras},
                "proprio": spaces.Box(-np.inf, np.inf, (8,), np.float32),
                "task_id": spaces.Discrete(10),
            }
        )
        self.action_space = spaces.Box(-1.0, 1.0, (chunk_len, 7), np.float32)
        self._image_shape, self._chunk_len, self._work_s = image, chunk_len, work_s
        self._durations: list[float] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode that never ends; options are not looked at."""
        super().reset(seed=seed, options=options)
        self._elapsed = 0
        return self._observe(), self._info(0)

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Compute for a while; how long it took is kept for :meth:`take_durations`."""
        begin = time.perf_counter()
        self._elapsed += len(action)
        result = self._observe(), 0.0, False, False, self._info(len(action))
        while time.perf_counter() - begin < self._work_s:
            pass
        self._durations.append(time.perf_counter() - begin)
        return result

    def take_durations(self) -> list[float]:
        """Return the seconds of every step since the last call."""
        durations, self._durations = self._durations, []
        return durations

    def _observe(self) -> dict[str, Any]:
        images = self.image_out or {
            camera: np.zeros(self._image_shape, np.uint8) for camera in self.cameras
        }
        return {**images, "proprio": np.zeros(8, np.float32), "task_id": np.int64(0)}

    def _info(self, executed: int) -> dict[str, Any]:
        return {
            "success": False,
            "is_success": False,
            "executed_steps": executed,
            "elapsed_steps": self._elapsed,
            "instruction": "none",
            "task_id": 0,
            "init_state_id": -1,
        }


def make_stub(contender: Contender, index: int) -> StubEnv:  # noqa: ARG001
    """Return environment ``index``; all are alike."""
    return StubEnv(contender.env.chunk_len, contender.env.image_size)


class _StubDriver(VectorDriver):
    """Times every call of step and compares it with what the slowest worker spent in it."""

    def _worker_of(self) -> Sequence[int]:
        return range(self.contender.num_envs)

    def _worker_s(self) -> float | None:
        """Seconds that the slowest worker spent on the last call; None: only in its stubs."""
        return None

    def play(self, actions: np.ndarray) -> dict[str, Any]:
        """See :class:`Driver`; adds what each call took beyond the slowest worker, in seconds.

        ``overheads_s`` is beyond the worker's own time for its command, ``beyond_envs_s`` beyond
        the time inside its environments' ``step`` alone.
        """
        chunks = in_chunks(actions, self.contender.env.chunk_len)
        self.envs.call("take_durations")
        walls, busy = np.empty(len(chunks)), np.empty(len(chunks))
        begin = time.perf_counter()
        for index, chunk in enumerate(chunks):
            called = time.perf_counter()
            self.envs.step(chunk)
            walls[index] = time.perf_counter() - called
            busy[index] = self._worker_s() or np.nan
        seconds = time.perf_counter() - begin
        durations = np.asarray(self.envs.call("take_durations"))  # (N, calls)
        worker_of = np.asarray(self._worker_of())
        by_worker = [durations[worker_of == worker].sum(0) for worker in np.unique(worker_of)]
        slowest = np.max(by_worker, axis=0)
        return {
            "seconds": seconds,
            "steps": actions.shape[0] * actions.shape[1],
            "calls": len(chunks),
            "ended": 0,
            "overheads_s": walls - np.where(np.isnan(busy), slowest, busy),
            "beyond_envs_s": walls - slowest,
        }


class StubOursDriver(_StubDriver):
    """:class:`vla_gym.vector.LiberoVectorEnv` over stubs."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        from vla_gym.vector import LiberoVectorEnv

        self.envs = LiberoVectorEnv(
            contender.num_envs,
            None,
            workers=contender.workers,
            env_factory=partial(make_stub, contender),
        )
        self.envs.reset(seed=contender.seed)

    def _worker_of(self) -> Sequence[int]:
        return list(self.envs.worker_of)

    def _worker_s(self) -> float:
        return float(self.envs.worker_seconds.max())

    def worker_pids(self) -> list[int]:
        """See :class:`Driver`."""
        return list(self.envs.worker_pids)


class StubAsyncDriver(_StubDriver):
    """:class:`gymnasium.vector.AsyncVectorEnv` over stubs."""

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        from gymnasium.vector import AsyncVectorEnv

        makers = [partial(make_stub, contender, i) for i in range(contender.num_envs)]
        self.envs = AsyncVectorEnv(makers, context="forkserver")
        self.envs.reset(seed=contender.seed)

    def worker_pids(self) -> list[int]:
        """See :class:`Driver`."""
        return [process.pid for process in self.envs.processes]
