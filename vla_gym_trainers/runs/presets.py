"""Command-line parsing with yaml presets: dataclass defaults < preset < command line."""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro
import yaml

from vla_gym.errors import ConfigError

Config = TypeVar("Config")


def parse_config(
    config_class: type[Config],
    arguments: Sequence[str],
    prog: str | None = None,
    default: Config | None = None,
) -> Config:
    """Parse command-line arguments into a config dataclass.

    ``--preset NAME_OR_FILE`` takes defaults from a yaml file: a name is looked up among the
    package's presets (``td3_goal``), anything ending in ``.yaml`` is a file.

    Args:
        config_class: A dataclass with a docstring per field.
        arguments: Without the program's name.
        prog: Program name in ``--help``.
        default: Defaults in place of the class's own.

    Raises:
        ConfigError: If the preset does not exist or does not fit.
    """
    rest = list(arguments)
    for index, argument in enumerate(rest):
        if argument == "--preset" or argument.startswith("--preset="):
            has_value = "=" in argument
            if not has_value and index + 1 >= len(rest):
                raise ConfigError("--preset needs a name or a yaml file.")
            preset = argument.split("=", 1)[1] if has_value else rest[index + 1]
            del rest[index : index + (1 if has_value else 2)]
            default = load_preset(config_class, preset)
            break
    description = (config_class.__doc__ or "") + (
        f"\n\n--preset NAME|FILE.yaml sets defaults from a preset: {', '.join(preset_names())}."
    )
    if default is None:
        return tyro.cli(config_class, args=rest, prog=prog, description=description)
    return tyro.cli(config_class, args=rest, prog=prog, default=default, description=description)


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package."""
    folder = importlib.resources.files("vla_gym.configs")
    return sorted(
        f.name.removesuffix(".yaml") for f in folder.iterdir() if f.name.endswith(".yaml")
    )


def load_preset(config_class: type[Config], preset: str) -> Config:
    """Return the dataclass with a preset's values.

    Args:
        config_class: The dataclass.
        preset: Name of a shipped preset, or path of a yaml file with field names as keys.

    Raises:
        ConfigError: If it does not exist, is not a mapping, has unknown keys, or names a class as
            the VLA.
    """
    if preset.endswith(".yaml"):
        path = Path(preset)
        if not path.is_file():
            raise ConfigError(f"Preset file {preset} does not exist.")
        text = path.read_text(encoding="utf-8")
    else:
        if preset not in preset_names():
            raise ConfigError(
                f"Unknown preset {preset!r}: expected one of {', '.join(preset_names())} or a "
                "path ending in .yaml."
            )
        file = importlib.resources.files("vla_gym.configs") / f"{preset}.yaml"
        text = file.read_text(encoding="utf-8")
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"Preset {preset} is not valid yaml: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"Preset {preset} must map field names to values.")
    assert dataclasses.is_dataclass(config_class)
    fields = {field.name for field in dataclasses.fields(config_class)}
    unknown = sorted(str(key) for key in values.keys() - fields)
    if unknown:
        raise ConfigError(
            f"Preset {preset} has unknown keys {unknown}; {config_class.__name__} has "
            f"{', '.join(sorted(fields))}."
        )
    if str(values.get("vla", "")).startswith("class:"):
        raise ConfigError(
            f"Preset {preset} names a class to import as its VLA: only the command line "
            "may, with --vla."
        )
    converted: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }
    for key in ("run_dir", "out", "policy"):
        if isinstance(converted.get(key), str):
            converted[key] = Path(converted[key])
    return config_class(**converted)
