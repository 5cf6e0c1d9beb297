"""Frozen VLA backends: the protocol, and :func:`load`.

Importing this package imports neither torch nor transformers; loading a model does.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from vla_gym.errors import WeightsError
from vla_gym.vla.base import FrozenVLA, TokenVLA, VLAOutput
from vla_gym.vla.files import resolve_weights, verify_checksums

__all__ = ["FrozenVLA", "TokenVLA", "VLAOutput", "load"]


def load(name_or_path: str | Path, device: str = "cpu") -> FrozenVLA:
    """Return a frozen VLA; the same one for every call with the same arguments.

    Args:
        name_or_path: A shipped checkpoint (``"mini"``) or a folder with config.json and
            model.safetensors.
        device: Torch device, e.g. ``"cpu"`` or ``"cuda:0"``.

    Raises:
        WeightsError: If the checkpoint is missing, corrupt or of an unknown architecture.
    """
    return _load(resolve_weights(name_or_path), device)


@cache
def _load(folder: Path, device: str) -> FrozenVLA:
    verify_checksums(folder)
    try:
        model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    except (ValueError, AttributeError) as error:
        raise WeightsError(f"{folder / 'config.json'} is no JSON object: {error}") from error
    from vla_gym.vla import mini  # imports torch and transformers

    if model_type != mini.MiniVLAConfig.model_type:
        raise WeightsError(
            f"Checkpoint {folder} has model_type {model_type!r}: expected "
            f"{mini.MiniVLAConfig.model_type!r}."
        )
    return mini.MiniBackend.from_pretrained(folder, device=device)
