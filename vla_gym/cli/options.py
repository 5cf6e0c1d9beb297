"""Reads the options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TypeVar

Config = TypeVar("Config")


def parse_options(config_class: type[Config], arguments: Sequence[str], command: str) -> Config:
    """Return the options of ``vla-gym COMMAND`` as a dataclass, ``--help`` from its docs.

    Args:
        config_class: A dataclass with a docstring below each field.
        arguments: What stands behind the command.
        command: Its name.
    """
    import tyro

    return tyro.cli(
        config_class,
        args=list(arguments),
        prog=f"vla-gym {command}",
        description=inspect.cleandoc(config_class.__doc__ or ""),
    )
