"""LIBERO's own vector environment behind the benchmark's interface."""

from __future__ import annotations

import importlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.cli.bench.drivers import NO_LIMIT, Driver
from vla_gym.cli.bench.spec import Contender, EnvSpec

_NOOP = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
#: No-ops that LIBERO's evaluations run after ``set_init_state``; our resets hold them.
_SETTLE_STEPS = 10


class LiberoDriver(Driver):
    """LIBERO's own ``SubprocVectorEnv`` over its own environments, as its scripts use them.

    Every action is one control step and every observation is rendered: it has no chunks.
    """

    def __init__(self, contender: Contender) -> None:
        super().__init__(contender)
        from vla_gym.assets import resolve_asset_pack
        from vla_gym.suites.libero import upstream_env

        upstream_env.prepare(resolve_asset_pack(contender.env.assets).root, Path.cwd())
        envs: Any = importlib.import_module("libero.libero.envs")
        makers = [partial(_make_upstream, contender.env, i) for i in range(contender.num_envs)]
        self._envs = envs.SubprocVectorEnv(makers)
        self._envs.seed(contender.seed)
        self._envs.reset()

    def reset(self, init_state_id: int, states: np.ndarray | None) -> dict[str, float]:  # noqa: ARG002
        """See :class:`Driver`."""
        assert states is not None
        begin = time.perf_counter()
        self._envs.reset()
        self._envs.set_init_state(states)
        plain = time.perf_counter()
        noops = np.tile(_NOOP, (self.contender.num_envs, 1))
        for _ in range(_SETTLE_STEPS):
            self._envs.step(noops)
        return {"plain_s": plain - begin, "settled_s": time.perf_counter() - begin}

    def reset_one(self, init_state_id: int, states: np.ndarray | None) -> float:  # noqa: ARG002
        """See :class:`Driver`."""
        assert states is not None
        begin = time.perf_counter()
        self._envs.reset([0])
        self._envs.set_init_state(states[:1], [0])
        for _ in range(_SETTLE_STEPS):
            self._envs.step(_NOOP[None], [0])
        return time.perf_counter() - begin

    def play(self, actions: np.ndarray) -> dict[str, Any]:
        """See :class:`Driver`."""
        steps = ended = 0
        by_step = np.ascontiguousarray(actions.swapaxes(0, 1), np.float64)
        begin = time.perf_counter()
        for rows in by_step:
            _, _, dones, _ = self._envs.step(rows)
            steps += len(rows)
            ended += int(np.sum(dones))
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "steps": steps, "calls": len(by_step), "ended": ended}

    def worker_pids(self) -> list[int]:
        """See :class:`Driver`."""
        return [worker.process.pid for worker in self._envs.workers]

    def close(self) -> None:
        """See :class:`Driver`."""
        self._envs.close()


def _make_upstream(spec: EnvSpec, index: int) -> Any:
    """Return upstream's environment; runs in a worker that SubprocVectorEnv has forked."""
    from vla_gym.suites.libero.tasks import libero_tasks

    envs: Any = importlib.import_module("libero.libero.envs.env_wrapper")
    arguments: dict[str, Any] = {
        "bddl_file_name": str(libero_tasks(spec.suite)[spec.task_of(index)].bddl_file),
        "horizon": NO_LIMIT,
    }
    if spec.image_size == 0:
        return envs.ControlEnv(
            **arguments, use_camera_obs=False, has_offscreen_renderer=False, has_renderer=False
        )
    return envs.OffScreenRenderEnv(
        **arguments, camera_heights=spec.image_size, camera_widths=spec.image_size
    )
