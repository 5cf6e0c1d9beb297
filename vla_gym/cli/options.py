"""Reads the options of a command."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from vla_gym.errors import ConfigError

Config = TypeVar("Config")
#: Longest word of a command line; a path has at most 1,024 characters.
MAX_WORD = 2048


def check_words(arguments: Sequence[str]) -> None:
    """Check the words of a command line, which messages repeat.

    Raises:
        ConfigError: If one is too long to be meant.
    """
    if long := next((word for word in arguments if len(word) > MAX_WORD), None):
        raise ConfigError(
            f"Expected words of at most {MAX_WORD} characters, got {len(long)}: {long[:40]!r}..."
        )


def check_report(path: Path | None) -> None:
    """Check where a report is to be written, before what it tells is measured.

    Raises:
        ConfigError: If its folder does not exist, or it is a folder itself.
    """
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: its folder does not exist.")
    if path is not None and path.is_dir():
        raise ConfigError(f"{path} is a folder: expected the name of a file in it.")


def parse_options(config_class: type[Config], arguments: Sequence[str], command: str) -> Config:
    """Return the options of ``vla-gym COMMAND``, of a dataclass with a docstring for each field.

    Raises:
        ConfigError: If a word is too long.
    """
    import tyro

    check_words(arguments)
    return tyro.cli(
        config_class,
        args=list(arguments),
        prog=f"vla-gym {command}",
        description=inspect.cleandoc(config_class.__doc__ or ""),
    )
