"""Named NumPy arrays in one block of shared memory that no name in a file system points to."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from vla_gym.errors import ConfigError

#: Shape and dtype of one array.
Layout = Mapping[str, tuple[tuple[int, ...], str]]

_ALIGNMENT = 64  # a cache line, so that two arrays never share one


class SharedArrays:
    """Arrays that several processes see.

    The block is a ``memfd``: it exists as long as a process maps it or holds its descriptor, so
    nothing stays behind after a crash.

    Attributes:
        layout: Shape and dtype by name.
        arrays: The arrays by name.
        fd: Descriptor to pass to another process, or -1 for memory of this process alone.
    """

    def __init__(self, layout: Layout, *, fd: int | None = None, shared: bool = True) -> None:
        """Create the arrays, filled with zeros, or attach to those behind a descriptor.

        Args:
            layout: Shape and dtype by name; the same on both sides.
            fd: Descriptor of an existing block, which is closed after mapping; None for a new one.
            shared: False for plain memory of this process.
        """
        self.layout = dict(layout)
        offsets, size = {}, 0
        for name, (shape, dtype) in self.layout.items():
            offsets[name] = size
            length = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
            size += -(-length // _ALIGNMENT) * _ALIGNMENT
        size = max(size, _ALIGNMENT)
        buffer: Any
        if not shared:
            self.fd, buffer = -1, bytearray(size)
        elif fd is None:
            self.fd = os.memfd_create("vla-gym")
            os.ftruncate(self.fd, size)
            buffer = mmap.mmap(self.fd, size)
        else:
            self.fd = -1
            buffer = mmap.mmap(fd, size)
            os.close(fd)
        self.arrays: dict[str, np.ndarray] = {
            name: np.ndarray(shape, dtype, buffer=buffer, offset=offsets[name])
            for name, (shape, dtype) in self.layout.items()
        }

    def __getitem__(self, name: str) -> np.ndarray:
        """Return an array."""
        return self.arrays[name]

    def close(self) -> None:
        """Close the descriptor and let go of the arrays.

        The memory is freed when the last view of it is gone, here and in other processes.
        """
        self.arrays.clear()  # whoever else holds the mapping lets go of them, too
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def leaves(space: spaces.Space[Any], name: str = "obs") -> dict[str, spaces.Space[Any]]:
    """Return the array-like spaces inside ``space`` by path, e.g. ``obs/agentview``.

    Raises:
        ConfigError: If the space is, or holds, one that has no fixed shape and dtype.
    """
    if isinstance(space, spaces.Dict):
        found: dict[str, spaces.Space[Any]] = {}
        for key, inner in space.spaces.items():
            found |= leaves(inner, f"{name}/{key}")
        return found
    array_like = (spaces.Box, spaces.Discrete, spaces.MultiBinary, spaces.MultiDiscrete)
    if isinstance(space, array_like):
        return {name: space}
    raise ConfigError(
        "Expected a Box, Discrete, MultiBinary or MultiDiscrete space, or a Dict of them, which "
        f"fit into shared memory; got {space} at {name!r}."
    )


def write_value(arrays: Mapping[str, np.ndarray], value: Any, name: str = "obs") -> None:
    """Write an observation into the arrays of its leaves; what lies there already is not copied."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            write_value(arrays, inner, f"{name}/{key}")
    elif value is not arrays[name]:
        arrays[name][...] = value


def read_value(
    space: spaces.Space[Any], arrays: Mapping[str, np.ndarray], name: str = "obs"
) -> Any:
    """Put the arrays of the leaves together in the form of the space."""
    if isinstance(space, spaces.Dict):
        return {
            key: read_value(inner, arrays, f"{name}/{key}") for key, inner in space.spaces.items()
        }
    return arrays[name]
