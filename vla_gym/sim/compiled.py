"""The decorator of compiled functions whose callees are in other files.

numba stores compiled code on disk and compiles again when the function's own file has changed. It
does not notice a change in another file whose functions were compiled into this one; after an
update of some files that would run old code. With this decorator a change of any file of this
folder counts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def _folder_stamp() -> tuple[int, int]:
    """Return the newest change, in nanoseconds, and the total size of the folder's sources."""
    states = [path.stat() for path in Path(__file__).parent.glob("*.py")]
    return max(state.st_mtime_ns for state in states), sum(state.st_size for state in states)


def compiled(function: Function) -> Function:
    """Compile a function at its first call, cached on disk, callable without Python's lock.

    Divisions by zero give infinity or NaN, as in NumPy.
    """
    dispatcher: Any = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    # numba's own stamp is that of one file, in an attribute without a public name.
    with contextlib.suppress(AttributeError):
        index = dispatcher._cache._cache_file
        index._source_stamp = (index._source_stamp, _folder_stamp())
    result: Function = dispatcher
    return result
