"""Ordinary users, one cache: who may write where, and what a command says of the rest."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vla_gym.assets.cache import make_shared
from vla_gym.cli.main import run_command
from vla_gym.files import open_lock

FIRST, SECOND = 20001, 20002
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become two users")


def as_user(uid: int, work: Callable[[], Any]) -> None:
    """Do something in a process of another user."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            os.umask(0o022)
            work()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.fixture
def shared() -> Iterator[Path]:
    """Not in tmp_path, whose parents are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        cache = Path(folder, "cache")
        cache.mkdir()
        cache.chmod(0o1777)
        yield cache


def test_a_cache_that_is_open_stays_open_below(shared: Path) -> None:
    scenes = shared / "scenes"
    as_user(FIRST, lambda: make_shared(scenes))
    as_user(SECOND, lambda: (make_shared(scenes), (scenes / "other").mkdir()))
    private = shared.parent / "private" / "scenes"
    make_shared(private)
    assert private.stat().st_mode & 0o022 == 0


def test_a_lock_keeps_users_out_of_each_others_way(shared: Path) -> None:
    path = shared / "key.lock"
    as_user(FIRST, lambda: open_lock(path).close())

    def blocked() -> None:
        with open_lock(path) as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    with open_lock(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        as_user(SECOND, blocked)
    as_user(SECOND, lambda: fcntl.flock(open_lock(path), fcntl.LOCK_EX | fcntl.LOCK_NB))


def test_a_path_that_may_not_be_used_is_one_line(shared: Path, capfd: Any) -> None:
    secret = shared.parent / "secret"
    secret.mkdir(mode=0o700)

    def command() -> None:
        assert run_command(lambda _: int((secret / "card.json").is_file()), []) == 2

    as_user(FIRST, command)
    error = capfd.readouterr().err
    assert error.startswith(f"error: {secret / 'card.json'} may not be used") and "\n" == error[-1]
    assert error.count("\n") == 1
