"""A run's settings on disk, and which of them may differ when it is resumed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from vla_gym.errors import ConfigError

Settings = TypeVar("Settings", bound=Any)


def read_settings(path: Path, kind: type[Settings]) -> Settings:
    """Read the ``config.json`` of a run.

    Args:
        path: The file; its folder becomes ``run_dir``.
        kind: A dataclass with an ``algorithm``; a setting that the file lacks takes its default.

    Raises:
        ConfigError: If the file is missing, is none, or has settings that ``kind`` lacks.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no run's configuration: {error}") from error
    fields = {field.name for field in dataclasses.fields(kind)}
    if not isinstance(values, dict) or not values.keys() <= fields:
        raise ConfigError(f"{path} is no configuration of vla-gym-train {kind.algorithm}.")
    made: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    made["run_dir"] = path.parent
    result: Settings = kind(**made)
    return result


def check_resumable(old: Settings, new: Settings, may_differ: Collection[str]) -> None:
    """Check that a run of ``old`` may go on with ``new``.

    Raises:
        ConfigError: If a setting differs that is not in ``may_differ``.
    """
    for field in dataclasses.fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after and field.name not in may_differ:
            raise ConfigError(
                f"The run has {field.name}={before!r}, not {after!r}: a resumed run may change "
                f"{', '.join(may_differ)} only. Start a new one in another --run-dir."
            )
