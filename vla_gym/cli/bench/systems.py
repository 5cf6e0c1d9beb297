"""The vector environments under measurement behind one interface; they run in child processes."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.cli.bench.config import SystemSpec
from vla_gym.cli.bench.measuring import NO_LIMIT, NOOP, SETTLE_STEPS, Measured


class System(Measured):
    """Vector environments of one kind, built and reset once by the constructor.

    LIBERO's own ``SubprocVectorEnv`` has no chunks: every action is one control step, and every
    observation is rendered.
    """

    def __init__(self, spec: SystemSpec) -> None:
        self.spec, self._is_libero = spec, spec.system == "libero"
        self.chunk_len = spec.config.chunk_len
        makers = {"ours": _make_ours, "async": _make_async, "libero": _make_libero}
        self.envs = makers[spec.system](spec)
        if self._is_libero:
            self.envs.seed(spec.config.seed)
            self.envs.reset()
        else:
            self.envs.reset(seed=spec.config.seed)

    def reset(self, init_state_id: int, states: list[np.ndarray] | None) -> None:
        """Reset every environment to an official state and settle it; see ``Measured.reset``."""
        if not self._is_libero:
            self.envs.reset(options={"init_state_id": init_state_id})
            return
        self.envs.reset()
        self.envs.set_init_state(states)
        noops = np.tile(NOOP, (self.spec.num_envs, 1))
        for _ in range(SETTLE_STEPS):
            self.envs.step(noops)

    def play(self, actions: np.ndarray) -> int:
        """Play actions (N, T, 7), T a multiple of the chunk length; return the episodes ended."""
        count, _, dim = actions.shape
        ended = 0
        if self._is_libero:
            for rows in np.ascontiguousarray(actions.swapaxes(0, 1), np.float64):
                ended += int(np.sum(self.envs.step(rows)[2]))
            return ended
        chunks = actions.reshape(count, -1, self.spec.config.chunk_len, dim).swapaxes(0, 1)
        for chunk in np.ascontiguousarray(chunks, np.float32):
            _, _, terminations, truncations, _ = self.envs.step(chunk)
            ended += int((terminations | truncations).sum())
        return ended

    def worker_pids(self) -> list[int]:
        """Return the processes that hold environments."""
        if self.spec.system == "ours":
            return list(self.envs.worker_pids)
        if self._is_libero:
            return [worker.process.pid for worker in self.envs.workers]
        return [process.pid for process in self.envs.processes]


def _make_ours(spec: SystemSpec) -> Any:
    from vla_gym.vector import LiberoVectorEnv

    return LiberoVectorEnv(
        spec.num_envs,
        spec.config.suite,
        workers=spec.config.num_workers,
        task_ids=[[spec.task_of(i)] for i in range(spec.num_envs)],
        **_env_arguments(spec),
    )


def _make_async(spec: SystemSpec) -> Any:
    from gymnasium.vector import AsyncVectorEnv

    makers = [partial(_make_single, spec, i) for i in range(spec.num_envs)]
    # Not fork, the default: it is fatal in a process that has rendered or run torch.
    return AsyncVectorEnv(makers, context="forkserver")


def _make_libero(spec: SystemSpec) -> Any:
    from vla_gym.assets import resolve_asset_pack
    from vla_gym.suites.libero import upstream_env

    upstream_env.prepare(resolve_asset_pack(spec.config.assets).root, Path.cwd())
    upstream: Any = importlib.import_module("libero.libero.envs")
    return upstream.SubprocVectorEnv(
        [partial(_make_upstream, spec, i) for i in range(spec.num_envs)]
    )


def _env_arguments(spec: SystemSpec) -> dict[str, Any]:
    """Return ``LiberoEnv``'s arguments, without the tasks."""
    config = spec.config
    return {
        "assets": config.assets,
        "chunk_len": config.chunk_len,
        "max_control_steps": NO_LIMIT,
        "cameras": None if config.image_size else (),
        "image_size": config.image_size or 1,
        "visual_profile": config.visual_profile,
    }


def _make_single(spec: SystemSpec, index: int) -> Any:
    from vla_gym.envs.libero import LiberoEnv

    return LiberoEnv(spec.config.suite, task_ids=spec.task_of(index), **_env_arguments(spec))


def _make_upstream(spec: SystemSpec, index: int) -> Any:
    """Return LIBERO's environment; runs in a worker that SubprocVectorEnv has forked."""
    from vla_gym.suites import get_task

    wrappers: Any = importlib.import_module("libero.libero.envs.env_wrapper")
    task: Any = get_task(spec.config.suite, spec.task_of(index))  # one of LIBERO's
    bddl_file = str(task.bddl_file)
    arguments: dict[str, Any] = {"bddl_file_name": bddl_file, "horizon": NO_LIMIT}
    if spec.config.image_size == 0:
        return wrappers.ControlEnv(
            **arguments, use_camera_obs=False, has_offscreen_renderer=False, has_renderer=False
        )
    return wrappers.OffScreenRenderEnv(
        **arguments, camera_heights=spec.config.image_size, camera_widths=spec.config.image_size
    )
