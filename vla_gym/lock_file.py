"""Files that processes lock to keep each other out of a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file for ``fcntl.flock``; it is made if need be, and never changed.

    A symbolic link is not followed: where others may write, it could name a file of ours.

    Raises:
        OSError: If it cannot be made, or is a symbolic link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "r+b", buffering=0)
