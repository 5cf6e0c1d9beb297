"""JSON files in which one value is another, and what must be said of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vla_gym.errors import VlaGymError


def spoil(file: Path, place: str, value: Any) -> Path:
    """Put another value at a place such as ``results.episodes.0.success``; return the file."""
    content = json.loads(file.read_text())
    *folders, last = (int(part) if part.isdigit() else part for part in place.split("."))
    inner = content
    for name in folders:
        inner = inner[name]
    inner[last] = value
    file.write_text(json.dumps(content))
    return file


def refused(
    work: Callable[[], object], *words: object, kind: type[VlaGymError] = VlaGymError
) -> str:
    """Return the message of an error, which must be one line and hold these words."""
    with pytest.raises(kind) as caught:
        work()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1500, message
    assert all(str(word) in message for word in words), message
    return message
