"""Starts the workers of a vector environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from vla_gym.errors import ConfigError
from vla_gym.vector.plan import EnvPlan
from vla_gym.vector.pool import LocalPool, Pool
from vla_gym.vector.process_pool import ProcessPool
from vla_gym.vector.process_server import ProcessServer
from vla_gym.vector.runner import Runner
from vla_gym.vector.shared_memory import table_layout
from vla_gym.vector.worker import EnvSpaces, WorkerSpec, check_spaces


def start_workers(
    plan: EnvPlan,
    workers: int | None,
    mode: AutoresetMode,
    *,
    render_devices: Sequence[int] | None,
    restart: bool,
    max_restarts: int,
    step_timeout: float,
    start_timeout: float,
) -> tuple[Runner, EnvSpaces]:
    """Start workers and wait until they have built their environments.

    Returns:
        What drives them, and the spaces that all environments have.

    Raises:
        ConfigError: If the number of workers is negative, or the spaces differ or don't fit into
            arrays.
        AssetError, CompileError: If the scenes can't be loaded.
        WorkerError: If the environments can't be built.
    """
    if workers is not None and (not isinstance(workers, int | np.integer) or workers < 0):
        raise ConfigError(f"workers must be None or a number from 0 on, got {workers!r}.")
    cores = len(os.sched_getaffinity(0))
    num_workers = max(1, min(cores if workers is None else int(workers), plan.num_envs))
    blocks = np.array_split(np.arange(plan.num_envs), num_workers)
    specs = [
        WorkerSpec(worker, tuple(block.tolist()), plan.make_env)
        for worker, block in enumerate(blocks)
    ]

    def environ(worker: int) -> dict[str, str]:
        if not render_devices:
            return {}
        return {"MUJOCO_EGL_DEVICE_ID": str(render_devices[worker % len(render_devices)])}

    def preload(server: ProcessServer) -> None:
        if plan.suite is not None and plan.assets is not None:
            tasks = [(task.suite, task.task_id) for task in plan.tasks]
            shown = {"clutter": plan.clutter, "images": plan.images}
            server.preload(tasks, plan.assets, timeout=start_timeout, **shown)

    if workers == 0:
        pool: Pool = LocalPool(specs[0])
    else:
        limits = {"step_timeout": step_timeout, "start_timeout": start_timeout}
        pool = ProcessPool(specs, blocks, environ=environ, prepare=preload, **limits)
    try:
        runner = Runner(pool, blocks, mode, restart=restart, max_restarts=max_restarts)
        found = runner.wait_ready()
        for block, other in zip(blocks, found, strict=True):
            check_spaces(int(block[0]), other, found[0])
        if isinstance(found[0].action_space, spaces.Dict):
            raise ConfigError(f"Expected one array as action space, got {found[0].action_space}.")
        same_step = mode == AutoresetMode.SAME_STEP
        layout = table_layout(
            found[0].observation_space,
            found[0].action_space,
            plan.num_envs,
            num_workers,
            final_rows=same_step,
        )
        runner.attach(pool.attach(layout, same_step=same_step))
    except BaseException:
        pool.close()
        raise
    return runner, found[0]
