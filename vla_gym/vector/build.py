"""From a plan to running workers."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from vla_gym.errors import ConfigError, WorkerError, WorkerRestartWarning
from vla_gym.vector import protocol
from vla_gym.vector.plan import EnvPlan
from vla_gym.vector.pool import LocalPool, Pool
from vla_gym.vector.process_pool import ProcessPool, describe_exit
from vla_gym.vector.process_server import ProcessServer
from vla_gym.vector.runner import Runner, outside
from vla_gym.vector.shared_memory import SharedArrays, table_layout
from vla_gym.vector.worker import EnvSpaces, WorkerSpec, build_slots

_EXIT_S = 10.0  # for a process to end


@dataclass
class Workforce:
    """Running workers and what they share.

    Attributes:
        runner: Their state.
        memory: The shared table.
        spaces: Spaces and metadata of the environments.
        owner: Process that started them.
    """

    runner: Runner
    memory: SharedArrays
    spaces: EnvSpaces
    owner: int = field(default_factory=os.getpid)


def start_workforce(
    plan: EnvPlan,
    workers: int | None,
    mode: AutoresetMode,
    *,
    render_devices: Sequence[int] | None,
    restart: bool,
    max_restarts: int,
    step_timeout: float,
    start_timeout: float,
) -> Workforce:
    """Start workers and wait until they have built their environments.

    Raises:
        ConfigError: If the number of workers is negative, or the spaces don't fit into arrays.
        AssetError, CompileError: If the scenes can't be loaded.
        WorkerError: If the environments can't be built.
    """
    if workers is not None and (not isinstance(workers, int | np.integer) or workers < 0):
        raise ConfigError(f"workers must be None or a number from 0 on, got {workers!r}.")
    cores = len(os.sched_getaffinity(0))
    local = workers == 0
    num_workers = max(1, min(cores if workers is None else int(workers), plan.num_envs))
    environ = _environ(render_devices)
    # An environment that was built in this process to look at its spaces is used, not wasted.
    first: dict[int, gym.Env[Any, Any]] = {}
    if plan.plain or local:
        first[0] = plan.make_env(0)
        env_spaces = EnvSpaces.of(first[0])
    else:
        attempts = max_restarts + 1 if restart else 1
        env_spaces = probe_spaces(plan, environ(0), timeout=start_timeout, attempts=attempts)
    if isinstance(env_spaces.action_space, spaces.Dict):
        raise ConfigError(f"Expected one array as action space, got {env_spaces.action_space}.")
    blocks = np.array_split(np.arange(plan.num_envs), num_workers)
    same_step = mode == AutoresetMode.SAME_STEP
    layout = table_layout(
        env_spaces.observation_space,
        env_spaces.action_space,
        plan.num_envs,
        num_workers,
        final_rows=same_step,
    )
    pair = (env_spaces.observation_space, env_spaces.action_space)
    specs = [
        WorkerSpec(worker, tuple(block.tolist()), plan.make_env, layout, same_step, pair)
        for worker, block in enumerate(blocks)
    ]
    memory = SharedArrays(layout, shared=not local)
    pool: Pool | None = None
    try:
        if local:
            pool = LocalPool(build_slots(specs[0], memory, first), memory)
        else:
            pool = ProcessPool(
                specs,
                blocks,
                memory,
                environ=environ,
                prepare=lambda server: _prepare(server, plan, start_timeout),
                step_timeout=step_timeout,
                start_timeout=start_timeout,
            )
        runner = Runner(
            pool, memory.arrays, blocks, mode, restart=restart, max_restarts=max_restarts
        )
        if not local:
            runner.wait_ready()
    except BaseException:
        if pool is not None:
            pool.close()
        memory.close()
        raise
    return Workforce(runner, memory, env_spaces)


def _prepare(server: ProcessServer, plan: EnvPlan, timeout: float) -> None:
    """Load the models that all workers share."""
    if plan.suite is not None and plan.assets is not None:
        tasks = [(task.suite, task.task_id) for task in plan.tasks]
        shown = {"clutter": plan.clutter, "images": plan.images}
        server.preload(tasks, plan.assets, timeout=timeout, **shown)


def _environ(render_devices: Sequence[int] | None) -> Callable[[int], dict[str, str]]:
    """Return the function that gives a worker's environment variables."""

    def environ(worker: int) -> dict[str, str]:
        variables = {}
        if render_devices:
            device = render_devices[worker % len(render_devices)]
            variables["MUJOCO_EGL_DEVICE_ID"] = str(device)
        return variables

    return environ


def probe_spaces(
    plan: EnvPlan, environ: Mapping[str, str], *, timeout: float, attempts: int
) -> EnvSpaces:
    """Build environment 0 in a process of its own and return its spaces.

    The trainer's process stays free of whatever a factory or a wrapper does. A process that dies
    or hangs over it is started again, up to so many attempts.

    Raises:
        VlaGymError: What building it raised; other exceptions come as WorkerError.
    """
    server = ProcessServer.acquire()
    try:
        for attempt in range(attempts):
            message, reason = _probe(server, plan, environ, timeout)
            if message:
                break
            text = f"The process that built environment 0 {reason}; see what it printed above."
            if attempt == attempts - 1:
                raise WorkerError(text)
            text += " Another one was started."
            warnings.warn(text, WorkerRestartWarning, stacklevel=outside())
    finally:
        server.release()
    value = protocol.unpack_object(message)
    if message[:1] == protocol.FAILED:
        error, text = value
        raise error or WorkerError(f"Environment 0 could not be built:\n{text}")
    result: EnvSpaces = value
    return result


def _probe(
    server: ProcessServer, plan: EnvPlan, environ: Mapping[str, str], timeout: float
) -> tuple[bytes, str]:
    """Return what the process sent, or nothing and what became of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        payload = cloudpickle.dumps(WorkerSpec(0, (0,), plan.make_env))
        process = server.spawn(payload, [theirs.fileno()], environ, timeout=timeout)
        theirs.close()
        with Connection(ours.detach()) as connection:
            late = not connection.poll(timeout)
            try:
                message = b"" if late else connection.recv_bytes()
            except (EOFError, OSError):
                message = b""
    # A process that has ended by itself says how; one that is late, or stopped, is killed.
    code = None if late else process.exit_code(timeout if message else _EXIT_S)
    if code is None:
        code = process.kill(_EXIT_S)
    return message, f"was not done within {timeout:g} s" if late else describe_exit(code)
