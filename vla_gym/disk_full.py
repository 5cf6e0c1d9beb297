"""Knowing a full disk by the error that a library made of it."""

from __future__ import annotations

import errno

_NUMBERS = (errno.ENOSPC, errno.EDQUOT)
# Libraries written in Rust or C++ (safetensors, HDF5) keep the text alone.
_TEXTS = ("No space left on device", "Disk quota exceeded", "os error 28", "os error 122")


def is_disk_full(error: BaseException) -> bool:
    """Tell whether a full disk, or a full quota, is behind an error.

    Args:
        error: What was raised; what it was raised from, or while handling what, counts too, as
            closing a file that could not be written often raises something else.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, OSError) and one.errno in _NUMBERS:
            return True
        if any(text in str(one) for text in _TEXTS):
            return True
        waiting += [one.__cause__, one.__context__]
    return False


def disk_full_advice(error: BaseException) -> str:
    """Return what to tell the user of a command that keeps what it has done."""
    name = getattr(error, "filename", None)
    where = f" ({name})" if name else ""
    return (
        f"A disk is full{where}: free some space and run the command again, with --resume where it "
        "has that option. What is already there is kept."
    )
