"""Files that processes lock to keep each other out of a folder."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from vla_gym.errors import ConfigError


@contextmanager
def only_process(path: Path, otherwise: str) -> Iterator[None]:
    """Hold a lock file; the system lets go of it when the process ends, however it ends.

    Args:
        path: The lock file.
        otherwise: Message of the ConfigError if another process holds it.
    """
    with open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(otherwise) from error
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
