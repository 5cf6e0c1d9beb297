"""The workers of a vector environment, in processes or (workers=0) in this one."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from vla_gym.envs.checks import as_integer
from vla_gym.errors import ConfigError, WorkerError
from vla_gym.vector.plan import EnvPlan
from vla_gym.vector.process_pool import ProcessPool
from vla_gym.vector.processes.interrupts import Interrupts
from vla_gym.vector.shared_memory import Layout, map_arrays
from vla_gym.vector.worker import Event, Worker, WorkerSpec


class Pool(Protocol):
    """Workers as the trainer sees them; see :class:`~vla_gym.vector.process_pool.ProcessPool`.

    Attributes:
        blocks: Environment ids of each worker.
    """

    blocks: list[np.ndarray]

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that run on this machine."""

    def attach(self, layout: Layout, *, same_step: bool) -> dict[str, np.ndarray]:
        """Make the table, which the workers fill."""

    def run(self, worker: int, ids: np.ndarray, *, each: bool, options: Mapping[int, Any]) -> None:
        """Have environments of a worker do what their rows say, with reset options by id."""

    def call(self, worker: int, ids: Sequence[int], method: str, arguments: list[Any]) -> None:
        """Call a method of rows; the results come as an event."""

    def poll(self, timeout: float | None) -> list[Event]:
        """Wait for events; an empty list after ``timeout`` seconds, or if nothing is under way."""

    def start(self, worker: int) -> None:
        """Start a worker that failed again."""

    def close(self) -> None:
        """End all workers."""


class LocalPool:
    """The environments in this process: one worker that does everything at once."""

    pids: tuple[int, ...] = ()

    def __init__(self, spec: WorkerSpec, interrupts: Interrupts) -> None:
        """Build the environments."""
        self.blocks = [np.array(spec.env_ids)]
        self._interrupts = interrupts
        self._worker = Worker(spec)
        self._columns: dict[str, np.ndarray] = {}
        self._events = [self._worker.ready]

    def attach(self, layout: Layout, *, same_step: bool) -> dict[str, np.ndarray]:
        """Return the table, in memory of this process."""
        self._columns = map_arrays(layout)
        self._worker.attach(self._columns, same_step)
        return self._columns

    def run(self, worker: int, ids: np.ndarray, *, each: bool, options: Mapping[int, Any]) -> None:
        """Have environments do what their rows say; exceptions become ``"raised"`` events."""
        del each
        try:
            self._events += self._interrupts.wait(
                lambda: list(self._worker.run(ids.tolist(), options, each=False))
            )
        except Exception as error:
            self._events.append(Event("raised", worker, ids.tolist(), error))

    def call(self, worker: int, ids: Sequence[int], method: str, arguments: list[Any]) -> None:
        """Call a method of rows."""
        del worker
        self._events.append(self._interrupts.wait(self._worker.call, ids, method, arguments))

    def poll(self, timeout: float | None) -> list[Event]:
        """Return what has happened; nothing is ever under way."""
        del timeout
        events, self._events = self._events, []
        return events

    def start(self, worker: int) -> None:
        """Never needed: a failure here is the trainer's own."""
        raise WorkerError(f"Worker {worker} runs in this process and can't be restarted.")

    def close(self) -> None:
        """Close the environments."""
        if self._interrupts.in_fork:
            return  # a fork of the trainer
        self._worker.close()
        self._columns.clear()


def start_pool(
    plan: EnvPlan,
    workers: int | None,
    interrupts: Interrupts,
    *,
    render_devices: Sequence[int] | None,
    step_timeout: float,
    start_timeout: float,
) -> Pool:
    """Start the workers of a plan; ``"ready"`` events tell when they have built their environments.

    Raises:
        ConfigError: If the number of workers is negative, or ``render_devices`` lists no devices.
        AssetError, CompileError: If the scenes can't be loaded.
        WorkerError: If no process can be started.
    """
    if not isinstance(render_devices, Sequence | None) or isinstance(render_devices, str):
        raise ConfigError(f"render_devices lists device numbers, got {render_devices!r:.80}.")
    devices: list[int | None] = [as_integer(d, "A render device", 0) for d in render_devices or ()]
    wanted = len(os.sched_getaffinity(0)) if workers is None else as_integer(workers, "workers", 0)
    num_workers = max(1, min(wanted, plan.num_envs))
    blocks = np.array_split(np.arange(plan.num_envs), num_workers)
    specs = [
        WorkerSpec(w, tuple(block.tolist()), plan.make_env, plan.first, device)
        for w, (block, device) in enumerate(zip(blocks, itertools.cycle(devices or [None])))
    ]
    if wanted == 0:
        return LocalPool(specs[0], interrupts)
    return ProcessPool(
        specs,
        interrupts,
        scenes=plan.scenes,
        step_timeout=step_timeout,
        start_timeout=start_timeout,
    )
