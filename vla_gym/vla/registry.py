"""Names of VLA backends, and from a checkpoint's specification to the class that loads it.

A specification is one of

======================================  ========================================================
``"mini"``                              a checkpoint that is shipped with the package
``"openvla-oft:/path"``                 a checkpoint, and the backend that it is for
``"/path"``                             a folder; its config.json tells which backend it is for
``"class:package.module:Class:/path"``  a class of the caller's own, and what it loads
======================================  ========================================================

Options of the backend may follow: ``"openvla-oft:/path?unnorm_key=libero_goal&num_views=1"``.

The third kind only ever selects among backends that are installed. The last one imports what it
names, so it may come from code or from the command line, never from a file: who reads a
specification from a run's configuration or from a result passes ``allow_class=False``.

Packages add backends through the entry-point group ``vla_gym.vla``; in their pyproject.toml::

    [project.entry-points."vla_gym.vla"]
    my-vla = "my_package.backend:MyBackend"

and then ``load("my-vla:/path")`` works, as does ``load("/path")`` where config.json has
``"model_type": "my-vla"``. docs/extending.md tells what the class must offer.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from msgspec import Struct

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import Text
from vla_gym.vla.files import read_json, resolve_weights
from vla_gym.vla.spec_options import split_options

#: The package's own backends: "module:Class", imported when one is loaded.
BACKENDS = {
    "mini": "vla_gym.vla.mini.backend:MiniBackend",
    "openvla": "vla_gym.vla.openvla.autoregressive:OpenVLABackend",
    "openvla-oft": "vla_gym.vla.openvla.oft:OpenVLAOFTBackend",
    "qwen-oft": "vla_gym.vla.qwen.backend:QwenOFTBackend",
    "smolvla": "vla_gym.vla.flow.smolvla:SmolVLABackend",
    "pi0": "vla_gym.vla.flow.pi0:Pi0Backend",
    "pi05": "vla_gym.vla.flow.pi05:Pi05Backend",
}
ENTRY_POINTS = "vla_gym.vla"


class Spec(NamedTuple):
    """A parsed specification: backend name or "class:module:Class", what it loads, and how."""

    backend: str
    path: Path
    options: tuple[tuple[str, Any], ...] = ()


def parse_spec(spec: str | Path, *, allow_class: bool = True) -> Spec:
    """Return backend, path and options of a specification; nothing of the backend is imported.

    Args:
        spec: See the module; a :class:`~pathlib.Path` is always a folder.
        allow_class: Whether the ``class:`` kind is allowed.

    Raises:
        ConfigError: If the backend is unknown, a class is named where that is not allowed, or
            options are not written as ``name=value``.
        WeightsError: If the checkpoint does not exist or its kind cannot be told.
    """
    if isinstance(spec, str):
        place, options = split_options(spec)
        if options:
            found = parse_spec(place, allow_class=allow_class)
            return found._replace(options=tuple(sorted(options.items())))
        if spec.startswith("class:"):
            return _parse_class_spec(spec, allow_class)
        name, colon, rest = spec.partition(":")
        if colon and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            _check_known(name)
            return Spec(name, resolve_weights(rest) if name == "mini" else _existing(rest, spec))
        if not colon and name not in ("", "mini") and name in known_backends():
            raise ConfigError(
                f"{spec!r} is a backend without a checkpoint: write '{spec}:/path/to/checkpoint'."
            )
    folder = resolve_weights(spec)
    return Spec(recognise(folder), folder)


def known_backends() -> list[str]:
    """Return the names of the package's own backends and of the installed entry points."""
    own = list(BACKENDS)
    return own + sorted({point.name for point in entry_points(group=ENTRY_POINTS)} - set(own))


class _Config(Struct):
    model_type: Text | None = None
    type: Text | None = None


def recognise(folder: Path) -> str:
    """Return the name of the backend that a checkpoint folder is for.

    Raises:
        WeightsError: If config.json is no JSON object, or names a type that is unknown or that
            several backends could load.
    """
    config = read_json(folder / "config.json", _Config)
    model_type = config.model_type or config.type
    if model_type == "openvla":
        if any(folder.glob("*action_head*checkpoint*")):
            return "openvla-oft"
        raise WeightsError(
            f"Checkpoint {folder} is an OpenVLA without an action head, which may be meant for "
            f"either backend: write 'openvla:{folder}' if it was trained to give one token after "
            f"the other, 'openvla-oft:{folder}' if all tokens of a chunk at once."
        )
    name = "mini" if model_type == "vla_gym_mini" else model_type
    if name not in known_backends():
        raise WeightsError(
            f"Checkpoint {folder} has model_type {model_type!r}, which no backend claims: put the "
            f"backend before the path, '<name>:{folder}', with a name of: "
            f"{', '.join(known_backends())}."
        )
    return str(name)


def backend_class(name: str) -> Any:
    """Import and return a backend's class, which has a classmethod ``from_pretrained``.

    Args:
        name: A name of :func:`known_backends`, or ``"class:package.module:Class"``.

    Raises:
        ConfigError: If the name is unknown, or its module or class cannot be imported.
    """
    if name in BACKENDS:
        return _import(BACKENDS[name])
    if name.startswith("class:"):
        return _import(name.removeprefix("class:"))
    _check_known(name)
    points = list(entry_points(group=ENTRY_POINTS, name=name))
    if len({point.value for point in points}) > 1:
        raise ConfigError(
            f"Several installed packages offer the backend {name!r}: "
            f"{', '.join(sorted(point.value for point in points))}. Uninstall all but one."
        )
    return _import(points[0].value)


def _check_known(name: str) -> None:
    if name not in known_backends():
        raise ConfigError(
            f"No VLA backend is called {name!r}; known: {', '.join(known_backends())}. For a class "
            "of your own write 'class:package.module:Class:/path'."
        )


def _parse_class_spec(spec: str, allow_class: bool) -> Spec:
    if not allow_class:
        raise ConfigError(
            f"{spec!r} names a class to import, and comes from a file: only code and the command "
            "line may. Give it there, or install its package with an entry point 'vla_gym.vla'."
        )
    match = re.fullmatch(r"class:([\w.]+:\w+):(.+)", spec)
    if match is None:
        raise ConfigError(f"Expected 'class:package.module:Class:/path', got {spec!r:.80}.")
    return Spec(f"class:{match[1]}", _existing(match[2], spec))


def _existing(path: str, spec: str) -> Path:
    found = Path(os.path.expanduser(path))
    if not path or not os.path.exists(found):
        raise WeightsError(f"No checkpoint {path!r} (from {spec!r}): expected an existing folder.")
    return found.resolve()


def _import(path: str) -> Any:
    try:
        found = resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        hint = "; install it, or put its folder into PYTHONPATH"
        raise ConfigError(
            f"Cannot import the VLA backend {path!r}: {error}"
            f"{hint if isinstance(error, ImportError) else ''}."
        ) from error
    if not callable(getattr(found, "from_pretrained", None)):
        raise ConfigError(f"The VLA backend {path!r} has no classmethod from_pretrained.")
    return found
