"""Which VLA and RL token a trained policy belongs to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainedOn:
    """What a policy was trained on.

    Attributes:
        vla: As :func:`vla_gym.vla.load` takes it. It comes from a file: load it with
            ``allow_class=False``.
        rl_token: ``"auto"``, ``"mean"`` or the encoder's folder.
    """

    vla: str = "mini"
    rl_token: str = "auto"


def trained_on(path: Path) -> TrainedOn:
    """Read it from the configuration of a policy's run; without one, the defaults.

    Args:
        path: A run directory, or a .zip in one.
    """
    config = (path if path.is_dir() else path.parent) / "config.json"
    try:
        settings = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return TrainedOn()
    if not isinstance(settings, dict):
        return TrainedOn()
    default = TrainedOn()
    return TrainedOn(
        str(settings.get("vla", default.vla)), str(settings.get("rl_token", default.rl_token))
    )
