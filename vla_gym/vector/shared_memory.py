"""The shared table of a vector environment: named arrays with one row per environment.

All arrays lie in one block of shared memory that no name in a file system points to.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from vla_gym.errors import ConfigError
from vla_gym.memory import check_memory
from vla_gym.variation import VARIATION_WIDTH

#: Shape and dtype of one array.
Layout = Mapping[str, tuple[tuple[int, ...], str]]

_ALIGNMENT = 64  # a cache line, so that two arrays never share one

# What an environment is asked to do.
STEP, RESET = 1, 2
#: Columns that say which episode a reset begins.
OF_RESETS = ("seed", "episode", "reseed", "plays_as")
#: How the names of columns begin that workers write, but for observations.
OF_WORKERS = ("reward", "terminated", "truncated", "did_reset", "info", "final_info", "episode_")

#: Infos that travel as numbers; any other info is pickled. Types as in ``LiberoEnv``.
INFO_TYPES: dict[str, type] = {
    "success": bool,
    "is_success": bool,
    "executed_steps": int,
    "elapsed_steps": int,
    "task_id": int,
    "init_state_id": int,
    "discount": float,
    "progress": float,
    "variation": np.ndarray,
}
#: Shapes of those that are float64 arrays.
INFO_SHAPES = {"variation": (VARIATION_WIDTH,)}
#: Sent only when it changes; the last bit of the masks says that it is there.
TEXT_INFO = "instruction"
INFO_BITS = {key: 1 << bit for bit, key in enumerate((*INFO_TYPES, TEXT_INFO))}
_DTYPES = {bool: "?", int: "<i8", float: "<f8", np.ndarray: "<f8"}


def map_arrays(layout: Layout, fd: int | None = None) -> dict[str, np.ndarray]:
    """Map arrays that several processes see; they hold zeros at first.

    The block is a ``memfd``: it exists as long as a process maps it or holds its descriptor, so
    nothing stays behind after a crash, and it is freed when the last view of it is gone.

    Args:
        layout: Shape and dtype by name; the same on all sides.
        fd: Descriptor of the block, which grows as needed; None for plain memory of this process.
    """
    offsets, size = [], 0
    for shape, dtype in layout.values():
        offsets.append(size)
        length = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        size += -(-length // _ALIGNMENT) * _ALIGNMENT
    buffer: Any
    if fd is None:
        buffer = bytearray(size)
    else:
        os.ftruncate(fd, size)
        buffer = mmap.mmap(fd, size)
    return {
        name: np.ndarray(shape, dtype, buffer=buffer, offset=offset)
        for offset, (name, (shape, dtype)) in zip(offsets, layout.items(), strict=True)
    }


def fits_row(key: str, value: Any) -> bool:
    """Tell whether an info has the type, and an array the shape, of its column."""
    if key not in INFO_SHAPES:
        return type(value) is INFO_TYPES.get(key)
    fits = isinstance(value, np.ndarray) and value.shape == INFO_SHAPES[key]
    return bool(fits and value.dtype == np.float64)


def table_layout(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    num_envs: int,
    num_workers: int,
    *,
    final_rows: bool,
) -> Layout:
    """Return names, shapes and dtypes of the table.

    ``obs/...`` is double buffered, (2, N, ...): a worker writes the half that the trainer does not
    read, so an observation is whole even if its worker dies while it writes the next one. The
    spaces are of one environment, the action's a Box, Discrete, MultiBinary or MultiDiscrete; with
    ``final_rows`` final observations and infos are kept, as autoreset SAME_STEP needs.

    Raises:
        ConfigError: If a space does not fit into arrays.
        NotEnoughMemoryError: If the table does not fit into memory.
    """
    layout: dict[str, tuple[tuple[int, ...], str]] = {}

    def column(name: str, dtype: str, *shape: int) -> None:
        layout[name] = ((num_envs, *shape), dtype)

    for name, space in leaves(observation_space).items():
        shape, dtype = tuple(space.shape or ()), np.dtype(space.dtype).str
        layout[name] = ((2, num_envs, *shape), dtype)
        if final_rows:
            column(f"final_{name}", dtype, *shape)
    for name, space in leaves(action_space, "action").items():
        column(name, np.dtype(space.dtype).str, *(space.shape or ()))
    # Written by the trainer: what to do, into which half, and which episode is next.
    numbers = {"op": "|i1", "half": "|i1", "seed": "<i8", "episode": "<i8"}
    numbers |= {"reseed": "?", "plays_as": "<i8"}
    # Written by the workers.
    numbers |= {"reward": "<f8", "terminated": "?", "truncated": "?", "did_reset": "?"}
    numbers |= {"episode_ended": "?", "episode_return": "<f8", "episode_length": "<i8"}
    numbers |= {"episode_success": "?"}
    for name, dtype in numbers.items():
        column(name, dtype)
    for prefix in ("info", "final_info") if final_rows else ("info",):
        column(f"{prefix}_set", "<u8")
        for key, kind in INFO_TYPES.items():
            column(f"{prefix}/{key}", _DTYPES[kind], *INFO_SHAPES.get(key, ()))
    layout["progress"] = ((num_workers,), "<i8")
    size = sum(int(np.prod(s, dtype=np.int64)) * np.dtype(d).itemsize for s, d in layout.values())
    check_memory(
        2 * size,  # of the table as much again for the observation space's bounds
        f"The table of {num_envs} environments",
        "take fewer environments, smaller images or fewer cameras",
    )
    return layout


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


def write_value(arrays: Mapping[str, np.ndarray], value: Any) -> None:
    """Write an observation into the arrays of its leaves; what lies there already is not copied.

    Raises:
        ConfigError: If it has other entries than they.
    """
    parts = _parts(value, "obs")
    if parts.keys() != arrays.keys():  # the old values would stay
        raise ConfigError(
            f"Expected an observation with the entries of observation_space, {sorted(arrays)}, got "
            f"{sorted(parts)}."
        )
    for name, part in parts.items():
        if part is not arrays[name]:
            arrays[name][...] = part


def _parts(value: Any, name: str) -> dict[str, Any]:
    """Return what an observation is made of, by path as :func:`leaves` has it."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {p: v for key, part in value.items() for p, v in _parts(part, f"{name}/{key}").items()}


def read_value(
    space: spaces.Space[Any], arrays: Mapping[str, np.ndarray], name: str = "obs"
) -> Any:
    """Put the arrays of the leaves together in the form of the space."""
    if isinstance(space, spaces.Dict):
        return {
            key: read_value(inner, arrays, f"{name}/{key}") for key, inner in space.spaces.items()
        }
    return arrays[name]
