"""What a run has trained, and which VLA and RL token that belongs to."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vla_gym.errors import ConfigError
from vla_gym.vla.spec_options import split_options, with_option


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

    Raises:
        ConfigError: If there is a configuration that cannot be read.
    """
    config = (path if path.is_dir() else path.parent) / "config.json"
    default = TrainedOn()
    if not config.is_file():
        return default
    try:
        settings = dict(json.loads(config.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{config} is damaged ({error}): restore it, for it says what {path} was trained on."
        ) from error
    return TrainedOn(
        str(settings.get("vla", default.vla)), str(settings.get("rl_token", default.rl_token))
    )


def trained_vla(run_dir: Path, vla: str) -> str | None:
    """Return what :func:`vla_gym.vla.load` takes for the VLA that a run of PPO or GRPO has trained.

    A plain checkpoint if the run has one, else the VLA with the run's adapters; None if it has
    neither, its path cannot stand in a specification, or the run began with other adapters, which
    would be lost.

    Args:
        run_dir: The run's folder.
        vla: The VLA that the run began with.
    """
    if (run_dir / "vla").is_dir():
        return str(run_dir / "vla")
    folder = run_dir / "adapters"
    has_adapters = "adapters" in split_options(vla)[1]
    if not folder.is_dir() or has_adapters or set(str(folder)) & set("?&"):
        return None
    return with_option(vla, "adapters", str(folder))
