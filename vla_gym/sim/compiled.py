"""The decorator of compiled functions whose callees are in other files.

numba stores compiled code on disk and compiles again when the function's own file has changed. It
does not notice a change in another file whose functions were compiled into this one; after an
update of some files that would run old code. With this decorator a change of any file of
``vla_gym/sim`` counts.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
import numpy as np

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])


@functools.cache
def _folder_stamp() -> tuple[int, int]:
    """Return the newest change, in nanoseconds, and the total size of the folder's sources."""
    states = [path.stat() for path in Path(__file__).parent.rglob("*.py")]
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


# Compiled code that says `a[:] = b` brings along NumPy's text about shapes that differ: seconds of
# compiling for each pair of dimensions. These have a constant one.


@compiled
def copy_vector(source: np.ndarray, target: np.ndarray) -> None:
    """Copy an array (n,) into another one.

    Raises:
        ValueError: If their lengths differ.
    """
    if len(source) != len(target):
        raise ValueError("cannot copy a vector into one of another length")
    for i in range(len(source)):
        target[i] = source[i]


@compiled
def copy_matrix(source: np.ndarray, target: np.ndarray) -> None:
    """Copy an array (n, m) into another one.

    Raises:
        ValueError: If their shapes differ.
    """
    if source.shape != target.shape:
        raise ValueError("cannot copy a matrix into one of another shape")
    for i in range(source.shape[0]):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


def announce(function: Callable[..., Any], what: str) -> None:
    """Warn if the first call of a compiled function will have to compile it, which takes long.

    Args:
        function: Decorated by numba.
        what: What it is part of, for the message.
    """
    if not is_compiled(function):
        # A warning, as for scenes: the wait would look like a hang.
        logger.warning(
            "Compiling %s for its first use on this machine: up to a minute, several if other "
            "programs keep the processor busy.",
            what,
        )


def is_compiled(function: Callable[..., Any]) -> bool:
    """Tell whether a function decorated by numba is compiled, here or on disk."""
    with contextlib.suppress(AttributeError):  # attributes without a public name
        dispatcher: Any = function
        stored = dispatcher._cache._cache_file._load_index()  # empty if the source has changed
        return bool(dispatcher.signatures or stored)
    return True
