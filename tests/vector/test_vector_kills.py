"""Many random kills."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import psutil
import pytest
from vector_processes import children_of, descriptors
from vector_reference import DISABLED, HANG_S, begin, by_mode, follower, info_row, reset_due, rows

from vla_gym.errors import WorkerRestartWarning

pytestmark = pytest.mark.usefixtures("nothing_stays")


def rss(pid) -> int:
    """Resident memory in bytes."""
    return psutil.Process(pid).memory_info().rss


class Killer:
    """Kills the last two of three workers at random moments, one at a time."""

    def __init__(self, envs, kills):
        self.envs, self.left, self.doomed = envs, kills, None
        self.late: set[int] = set()
        self.rng = np.random.default_rng(0)

    def act(self, when: str) -> None:
        """Perhaps kill one; ``when`` is "idle" or "busy"."""
        if self.left == 0 or self.doomed is not None or self.rng.random() > 0.15:
            return
        worker = int(self.rng.integers(1, 3))
        name = "SIGSTOP" if self.rng.random() < 0.02 else "SIGKILL"
        if when == "busy" and self.rng.random() < 0.5:
            time.sleep(self.rng.random() * 2e-3)  # somewhere in the step
        os.kill(self.envs.worker_pids[worker], getattr(signal, name))
        self.doomed, self.left = worker, self.left - 1

    @contextmanager
    def during(self) -> Iterator[None]:
        """Perhaps kill one somewhere in the body, which does not return before it is done."""
        thread = threading.Thread(target=self.act, args=("busy",))
        thread.start()
        yield
        thread.join()

    def check(self, lost: list[int], warned: int, *, reset: bool = False) -> None:
        """A step lost these envs, with so many warnings; a reset loses none at once.

        A kill after the worker's part of a step is noticed in that step or in the next, and costs
        its envs the step after that; none if their episodes were over.
        """
        assert warned <= (self.doomed is not None)
        mates = set()
        if self.doomed is not None:
            mates = set(np.flatnonzero(self.envs.worker_of == self.doomed).tolist())
        assert set(lost) <= mates | self.late
        kept = self.late if reset else set()
        self.late = kept | mates if warned else kept
        if warned:
            self.doomed = None


@pytest.mark.slow
@pytest.mark.timeout(1500)
@by_mode
def test_200_random_kills_over_2000_episodes(make_vec, stub_server, mode):
    kills, episodes = 200, 2000
    limits = {"step_timeout": HANG_S, "start_timeout": 10.0, "max_restarts": 50}
    envs = make_vec(6, workers=3, autoreset_mode=mode, **limits)
    expected = follower(6, 1000, mode, keep=False)
    killer, figures, untouched, warned = Killer(envs, kills), [], [], 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", WorkerRestartWarning)
        expected.check_reset(envs.reset(seed=1000))
        while sum(expected.finished) < episodes or killer.left or killer.doomed is not None:
            killer.act("idle")
            if mode == DISABLED and any(expected.due):
                with killer.during():
                    reset_due(envs, expected)
                killer.check([], len(caught), reset=True)
                warned += len(caught)
                caught.clear()
            envs.step_async(expected.actions())
            killer.act("busy")
            result = envs.step_wait()
            untouched.append(_digest(result))
            lost = np.flatnonzero(result[4].get("worker_restarted", np.zeros(6, bool))).tolist()
            killer.check(lost, len(caught))
            expected.check_step(result, lost=lost)
            warned += len(caught)
            caught.clear()
            if sum(expected.finished) > (1 + len(figures)) * episodes // 8:
                gc.collect()
                figures.append((rss(os.getpid()), rss(stub_server.held.pid), len(descriptors())))
    assert warned == kills
    assert expected.lost[:2] == [0, 0] and sum(expected.lost) > kills
    assert len(children_of(stub_server.held.pid)) == 3
    for name, (early, late) in {
        "trainer's memory": (figures[1][0], figures[-1][0]),
        "server's memory": (figures[1][1], figures[-1][1]),
    }.items():
        assert late <= 1.02 * early, f"{name}: {early} -> {late} bytes"
    assert figures[-1][2] == figures[0][2], "descriptors"
    # The envs of the first worker, in a run without kills.
    calm = begin(envs, 1000, keep=False)
    for digest in untouched:
        reset_due(envs, calm)
        result = envs.step(calm.actions())
        calm.check_step(result)
        assert _digest(result) == digest
    assert calm.lost == [0] * 6 and calm.finished[:2] == expected.finished[:2]


def _digest(result) -> int:
    """Everything that envs 0 and 1 returned."""
    obs, *arrays, infos = result
    values = [rows(obs, slice(0, 2)), *(array[:2] for array in arrays)]
    return hash((repr(values), repr([info_row(infos, i) for i in (0, 1)])))
