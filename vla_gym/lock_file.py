"""Files that processes lock to keep each other out of a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


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
