"""The processes that record demonstrations."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from vla_gym.demos.worker import close_studio, start_worker

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


class _Here(Executor):
    """Runs everything at once in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return the finished call."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextmanager
def demo_pool(num_workers: int | None) -> Iterator[Executor]:
    """Open the process pool, one thread a process; with 0 workers everything runs in this one."""
    count = worker_count(num_workers)
    if count == 0:
        try:
            yield _Here()
        finally:
            close_studio()
        return
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    # Spawn: a fork after EGL or a GPU was initialised is fatal.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=start_worker)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def worker_count(num_workers: int | None) -> int:
    """Return the number of processes: one a core for None."""
    return num_workers if num_workers is not None else os.cpu_count() or 1
