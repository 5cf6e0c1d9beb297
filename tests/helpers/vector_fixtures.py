"""Fixtures of the vector env's tests; they import late what not every place of tests has."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from stub_envs import Fault

from vla_gym.vector.processes.client import ProcessServer


class _Server:
    """One server for all tests of a file, until a test kills it: starting it takes longer."""

    def __init__(self):
        self.held = self._started()

    def current(self):
        if not self.held.alive:
            self.held.release()
            self.held = self._started()
        return self.held

    @staticmethod
    def _started():
        """Return a server that answers: one that still starts opens files."""
        server = ProcessServer.acquire()
        server.load("vla_gym.vector.preload:preload", tasks=[], assets="lite", timeout=120)
        return server


@pytest.fixture(scope="module")
def stub_server():
    server = _Server()
    yield server
    server.held.release()


@pytest.fixture(scope="module")
def warm_server():
    """Keep one server, and the scenes in it, for all tests of a file."""
    server = ProcessServer.acquire()
    yield server
    gc.collect()
    server.release()


@pytest.fixture
def nothing_stays(stub_server):
    """After each test: no worker, no descriptor, no shared block more than before it."""
    import psutil
    from vector_processes import children_of, descriptors, memfd_maps, wait_until

    gc.collect()
    pid = stub_server.current().pid
    before = children_of(pid), len(descriptors()), memfd_maps(), psutil.Process(pid).num_fds()
    yield
    gc.collect()
    same = stub_server.held.alive
    pid = stub_server.current().pid
    wanted = before[0] if same else set()
    wait_until(lambda: children_of(pid) == wanted, f"the end of {children_of(pid) - wanted}")
    assert memfd_maps() <= before[2], "a shared block is still mapped"
    assert len(descriptors()) <= before[1], descriptors()
    if same:
        # It reaps a worker first and lets go of what belonged to it right after that.
        server = psutil.Process(pid)
        wait_until(lambda: server.num_fds() <= before[3], "descriptors of the server")


@pytest.fixture
def make_vec(nothing_stays):
    """Make stub vector envs that are closed after the test."""
    from vector_reference import stub_vecs

    with stub_vecs() as make:
        yield make


@pytest.fixture
def once(tmp_path):
    """Make faults that happen once; ``once.reached()`` counts those that did."""

    class Once:
        flags: list[Path] = []

        def __call__(self, *args, **kwargs):
            self.flags = [*self.flags, tmp_path / f"fault{len(self.flags)}"]
            return Fault(*args, **kwargs, flag=str(self.flags[-1]))

        def reached(self):
            return sum(flag.exists() for flag in self.flags)

    return Once()
