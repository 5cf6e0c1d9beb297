"""Weights in the files that checkpoints are published in.

Safetensors come first, in one file or in shards; then what ``torch.save`` wrote, which is read
with ``weights_only=True``: a file that holds more than tensors is refused, never unpickled.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import safetensors
import torch
from msgspec import Meta, Struct

from vla_gym.errors import WeightsError
from vla_gym.vla.files import read_json

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_SINGLES = ("model.safetensors", "pytorch_model.bin")


class Checkpoint:
    """The tensors of a checkpoint by name; safetensors are read when asked for, one at a time.

    Attributes:
        path: The folder or file.
        shapes: Shape of every tensor by name, without the prefix ``module.`` that
            DistributedDataParallel puts before all of them.
    """

    def __init__(self, path: str | Path) -> None:
        """Look at names and shapes in a file, or in a folder's :func:`weight_files`.

        Raises:
            WeightsError: If a file is missing, corrupt, or holds more than tensors.
        """
        self.path = Path(path)
        self._handles: dict[str, Any] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in weight_files(self.path):
            self._read_names(file)
        if not self.shapes:
            raise WeightsError(f"Checkpoint {self.path} holds no tensors.")
        self._prefix = "module." if all(n.startswith("module.") for n in self.shapes) else ""
        self.shapes = {n.removeprefix(self._prefix): shape for n, shape in self.shapes.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, on the CPU, as it was stored.

        Raises:
            WeightsError: If its bytes cannot be read.
        """
        name = self._prefix + name
        if name in self._tensors:
            return self._tensors[name]
        try:
            found: torch.Tensor = self._handles[name].get_tensor(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise WeightsError(f"Cannot read {name!r} from {self.path}: {error}") from error
        return found

    def _read_names(self, file: Path) -> None:
        _check_present(file)
        try:
            if file.suffix not in (".bin", ".ckpt", ".pt", ".pth"):
                handle = safetensors.safe_open(file, framework="pt")
                for name in handle.keys():  # noqa: SIM118 (no mapping)
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
                    self._handles[name] = handle
                return
            tensors = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # corrupt zip, pickle and safetensors headers raise anything
            raise WeightsError(
                f"Cannot read weights from {file}: {error}. Expected an undamaged file that holds "
                "tensors and nothing else; copy or download it again."
            ) from error
        if isinstance(tensors, dict) and len(tensors) == 1:
            inner = next(iter(tensors.values()))
            tensors = inner if isinstance(inner, dict) else tensors
        if not isinstance(tensors, dict) or not all(
            isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in tensors.items()
        ):
            raise WeightsError(
                f"Expected a dictionary of tensors by name in {file}: save the network's "
                "state_dict() alone."
            )
        self._tensors |= tensors
        self.shapes |= {name: tuple(value.shape) for name, value in tensors.items()}


def weight_files(path: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights: the file itself, or those of a folder.

    Of a folder the index is taken, or the only file of weights.

    Raises:
        WeightsError: If there is none, the index is damaged or a shard is missing.
    """
    if path.is_file():
        return [path]
    for name in _INDEXES:
        if (path / name).is_file():
            return _shards(path / name)
    for name in _SINGLES:
        if (path / name).is_file():
            return [path / name]
    for pattern in ("*.safetensors", "*.pt"):
        found = sorted(path.glob(pattern))
        if len(found) == 1:
            return found
    raise WeightsError(
        f"No weights in {path}: expected {' or '.join((*_INDEXES, *_SINGLES))}, or one file "
        "*.safetensors or *.pt."
    )


def find_file(folder: Path, *words: str) -> Path | None:
    """Return the only file of a folder whose name contains all words, or None if there is none.

    Raises:
        WeightsError: If there are several.
    """
    found = sorted(f for f in folder.iterdir() if f.is_file() and all(w in f.name for w in words))
    if len(found) > 1:
        raise WeightsError(
            f"Expected one file with {' and '.join(map(repr, words))} in its name in {folder}, got "
            f"{', '.join(f.name for f in found)}: remove those of other training steps."
        )
    return found[0] if found else None


class _Index(Struct):
    weight_map: dict[str, Annotated[str, Meta(min_length=1, max_length=255)]]


def _shards(index: Path) -> list[Path]:
    names = sorted(set(read_json(index, _Index).weight_map.values()))
    if any(os.path.basename(name) != name for name in names):
        raise WeightsError(f"{index} names files outside its folder.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise WeightsError(
            f"Checkpoint {index.parent} lacks {', '.join(missing)}: copy or download it again."
        )
    return [index.parent / name for name in names]


def _check_present(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(40).startswith(b"version https://git-lfs"):
            raise WeightsError(
                f"{file} is a Git LFS pointer, not the weights: run 'git lfs pull' in its folder."
            )
