"""Options of a backend: ``openvla-oft:/path?unnorm_key=libero_goal``, checked at the door."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import numpy as np
import yaml

from vla_gym.errors import ConfigError
from vla_gym.outside import check_path, check_words, to_type

_Options = TypeVar("_Options")


def make_options(kind: type[_Options], values: Mapping[str, Any]) -> _Options:
    """Return the dataclass of a backend's options.

    Raises:
        ConfigError: If there is no such option, or its value is of another type.
    """
    known: list[str] = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(known)):
        raise ConfigError(
            f"The VLA backend does not take these options: {', '.join(unknown)}. It takes: device, "
            f"dtype, compile, {', '.join(known)}."
        )
    hints = get_type_hints(kind, include_extras=True)
    for name, value in values.items():
        if Path in get_args(hints[name]):
            if isinstance(value, bool | int | float):  # a folder's name that YAML reads as a number
                values = {**values, name: str(value)}
        else:
            value = value.item() if isinstance(value, np.generic) else value
            origin = f"The option {name} of the VLA backend"
            check_words(value, hints[name], origin)
            to_type(value, hints[name], origin)
    return kind(**values)


def split_options(spec: str) -> tuple[str, dict[str, Any]]:
    """Return a specification without its options, and these.

    Args:
        spec: ``"openvla-oft:/path?unnorm_key=libero_goal&append_stop=false"``. What follows the
            last ``?`` are options, each value a YAML scalar (40, true, null, a text), unless a
            file or folder has that whole name.

    Raises:
        ConfigError: If they are not ``name=value``, with ``&`` in between and each once, or name
            the device.
    """
    check_path(spec)
    place, mark, query = spec.rpartition("?")
    path = os.path.expanduser(spec.partition(":")[2] or spec)
    if not mark or os.path.exists(path):
        return spec, {}
    options: dict[str, Any] = {}
    for text in query.split("&"):
        name, equals, value = text.partition("=")
        if not (name.isidentifier() and equals):
            raise ConfigError(f"Expected options as name=value, got {text!r:.80}.")
        if name in options:
            raise ConfigError(f"The option {name!r} is given twice.")
        options[name] = _scalar(value)
    if "device" in options:
        raise ConfigError(
            f"{spec!r}: the device is no option of a specification: give it as device=..., on the "
            "command line as --device."
        )
    return place, options


def with_option(spec: str, name: str, value: object) -> str:
    """Return a specification with an option set, in place of what it says of it.

    Raises:
        ConfigError: As :func:`split_options`.
    """
    place, options = split_options(spec)
    options[name] = value

    def text(option: Any) -> str:
        plain = isinstance(option, str) and _scalar(option) == option
        return option if plain else json.dumps(option)

    return f"{place}?{'&'.join(f'{k}={text(v)}' for k, v in options.items())}"


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str | None) and not text.startswith(("'", '"')):
        return text if value or "#" in text else value  # "my run #2" ends in no comment
    if type(value) is int and str(value) != text:
        return text  # 007 and 2024_01 may be folders
    return value if isinstance(value, bool | int | float | str) else text
