"""Files that several processes use: locks, and files that appear whole."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from vla_gym.errors import ConfigError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a scratch file that takes the place of ``path`` in the end; nothing stays of a failure.

    So a file that exists is always whole, whenever the process is killed or the machine stops.
    """
    scratch = scratch_path(path)
    try:
        yield scratch
        sync(scratch)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def scratch_path(path: Path) -> Path:
    """Return what :func:`replacing` gives this thread, beside ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")


@contextmanager
def only_process(
    path: Path, otherwise: str, timeout_s: float = 0.0, error: type[Exception] = ConfigError
) -> Iterator[None]:
    """Hold a lock file; the system lets go of it when the process ends, however it ends.

    Args:
        path: The lock file.
        otherwise: Message of the error if another process holds it.
        timeout_s: How long to wait until it does not.
        error: What is raised then.

    Raises:
        OSError: If the file system has no locks; see :func:`open_lock`.
    """
    deadline = time.monotonic() + timeout_s
    with open_lock(path) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as held:
                if time.monotonic() >= deadline:
                    raise error(otherwise) from held
                time.sleep(0.05)
        yield


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file for ``fcntl.flock``; it is made if need be, and never changed.

    A symbolic link is not followed: where others may write, it could name a file of ours. A file
    that another user has made, in a cache that users share, is opened for reading, which is enough
    (NFS alone wants to write).

    Raises:
        OSError: If it cannot be made, or is a symbolic link.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.fdopen(os.open(path, flags | os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=0)
    except PermissionError as error:
        try:
            return os.fdopen(os.open(path, flags | os.O_RDONLY), "rb", buffering=0)
        except FileNotFoundError:
            raise error from None
