"""The one door for data from outside: JSON and YAML, read into types, with bounds.

What a file holds is described by a type (a dataclass, a ``msgspec.Struct``, ``dict[str, int]``);
readers check no field by hand. An error names the file, the field, what was expected and what came.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import stat
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import IO, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import yaml
from msgspec import Meta

from vla_gym.errors import ConfigError, VlaGymError

#: Bounds of what is read: bytes of a file, levels of nesting, values (YAML's aliases counted each
#: time they stand somewhere), characters of a path.
MAX_BYTES, MAX_DEPTH, MAX_VALUES, MAX_PATH = 64 * 2**20, 64, 2_000_000, 1024

#: A size of a network, and how many layers it has: far above any that exists, so that a sum of
#: products of them is no surprise.
Size = Annotated[int, Meta(ge=1, le=2**24)]
Layers = Annotated[int, Meta(ge=0, le=256)]
SomeLayers = Annotated[int, Meta(ge=1, le=256)]
#: Hidden widths of a small network.
Widths = Annotated[tuple[Size, ...], Meta(min_length=1, max_length=64)]
#: Side of an image in pixels.
ImageSide = Annotated[int, Meta(ge=1, le=4096)]
#: How many actions a chunk has, and how many tasks, states, steps there are.
ChunkLength = Annotated[int, Meta(ge=1, le=1000)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**53)]
PositiveFloat = Annotated[float, Meta(gt=0.0)]
NonNegativeFloat = Annotated[float, Meta(ge=0.0)]
Fraction = Annotated[float, Meta(ge=0.0, le=1.0)]
OpenFraction = Annotated[float, Meta(gt=0.0, lt=1.0)]
FractionBelow1 = Annotated[float, Meta(ge=0.0, lt=1.0)]
Text = Annotated[str, Meta(max_length=MAX_PATH)]
#: Any JSON object.
Object = dict[str, Any]

T = TypeVar("T")
_Error = type[VlaGymError]


def read_json(path: Path, kind: type[T], error: _Error = ConfigError, advice: str = "") -> T:
    """Return what a file of JSON holds.

    Args:
        path: A regular file.
        kind: Type of the whole.
        error: Raised for whatever is wrong.
        advice: What the file should be, or what to do; ends the error.

    Raises:
        VlaGymError: Of class ``error``, in one line.
    """
    return parse_json(read_bytes(path, error, advice), kind, str(path), error, advice)


def read_yaml(path: Any, kind: type[T], error: _Error = ConfigError, advice: str = "") -> T:
    """Return what a file of YAML holds; see :func:`read_json`."""
    data = read_bytes(path, error, advice)
    try:
        values = yaml.safe_load(io.BytesIO(data))
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as reason:
        # The last two are of tags on what they are not for, as !!bool maybe.
        raise _refused(error, f"{path} is not valid YAML: {one_line(reason)}", advice) from reason
    return to_type(values, kind, str(path), error, advice)


def parse_json(
    text: bytes | str, kind: type[T], origin: str, error: _Error = ConfigError, advice: str = ""
) -> T:
    """Return what JSON holds; ``origin`` names it in errors. See :func:`read_json`."""
    try:
        values = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError) as reason:
        raise _refused(error, f"{origin} is no valid JSON: {one_line(reason)}", advice) from reason
    return to_type(values, kind, origin, error, advice)


def to_type(
    values: Any, kind: type[T], origin: str, error: _Error = ConfigError, advice: str = ""
) -> T:
    """Return plain values as a type, strictly: no number is taken for a text, no text for a number.

    Args:
        values: What a parser returned.
        kind: See :func:`read_json`; a dataclass may check itself in ``__post_init__``.
        origin: Where they are from, for errors.
        error: Raised for whatever is wrong.
        advice: Ends the error.

    Raises:
        VlaGymError: Of class ``error``.
    """
    if problem := _out_of_bounds(values):
        raise _refused(error, f"{origin} {problem}", advice)
    if dataclasses.is_dataclass(kind) and isinstance(values, dict):
        names = sorted(field.name for field in dataclasses.fields(kind))
        if unknown := sorted(str(key) for key in values.keys() - set(names)):
            problem = f"has unknown keys {unknown}; {kind.__name__} has {', '.join(names)}"
            raise _refused(error, f"{origin} {problem}", advice)
    try:
        return msgspec.convert(values, kind, dec_hook=_custom)
    except (msgspec.ValidationError, RecursionError) as reason:
        if isinstance(reason.__cause__, VlaGymError):  # the dataclass's own, whole sentences
            raise error(f"{origin}: {reason.__cause__} {advice}".rstrip()) from reason
        raise _refused(error, f"{origin}: {_explained(reason, values)}", advice) from reason


def check_fields(settings: Any) -> None:
    """Check a dataclass's numbers, tuples and words of a few against its types, whoever gave them.

    Raises:
        ConfigError: If one is of another type, out of bounds, or none of the words.
    """
    hints = get_type_hints(type(settings), include_extras=True)
    for name in (field.name for field in dataclasses.fields(settings)):
        hint, value = hints[name], getattr(settings, name)
        value = value.item() if isinstance(value, np.generic) else value
        check_words(value, hint, name)
        if isinstance(value, int | float | tuple | list) or any(map(_is_number, _kinds_of(hint))):
            to_type(value, hint, name)


def check_words(value: Any, hint: Any, name: str) -> None:
    """Check a value whose type is ``Literal[...]``, or that or None; others are not looked at.

    Raises:
        ConfigError: If it is none of the words.
    """
    kinds = _kinds_of(hint)
    words = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), None)
    if words and value not in words and not (value is None and type(None) in kinds):
        raise ConfigError(f"{name}: expected {' or '.join(map(repr, words))}, got {_short(value)}.")


def _kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, else the one."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_number(kind: Any) -> bool:
    return (get_args(kind)[0] if get_origin(kind) is Annotated else kind) in (int, float)


def read_bytes(path: Any, error: _Error = ConfigError, advice: str = "") -> bytes:
    """Return the content of a regular file of at most :data:`MAX_BYTES` bytes.

    Raises:
        VlaGymError: Of class ``error``, if it is none, larger, or cannot be read.
    """
    try:
        # Without O_NONBLOCK the open of a named pipe would wait for somebody who writes.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as f:
            return _whole(f, path, error, advice)
    except FileNotFoundError as reason:
        raise _refused(error, f"{path} does not exist", advice) from reason
    except (OSError, ValueError) as reason:  # the second: a null byte in the path
        raise _refused(error, f"{_short(str(path))} cannot be read: {reason}", advice) from reason


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal text; once a process, unless it has changed."""
    state = path.stat()
    return _sha256(path, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@lru_cache(maxsize=512)
def _sha256(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_path(path: object) -> None:
    """Check that a path from a command line or a file is one that a file can have.

    Raises:
        ConfigError: If it is longer than :data:`MAX_PATH`, or has null bytes.
    """
    text = str(path)
    if len(text) > MAX_PATH or "\0" in text:
        raise ConfigError(
            f"Expected a path of at most {MAX_PATH} characters without null bytes, got "
            f"{_short(text)} of {len(text)}."
        )


def _whole(file: IO[bytes], path: Any, error: _Error, advice: str) -> bytes:
    state = os.fstat(file.fileno())
    if not stat.S_ISREG(state.st_mode):
        raise _refused(error, f"{path} is no regular file", advice)
    if state.st_size > MAX_BYTES:
        problem = f"{path} has {state.st_size} bytes: expected at most {MAX_BYTES}"
        raise _refused(error, problem, advice)
    return file.read(MAX_BYTES)


def _out_of_bounds(values: Any) -> str:
    """Return what is wrong with the values whatever their type shall be; empty if nothing is."""
    count, level = 0, [values]
    for _ in range(MAX_DEPTH):
        following: list[Any] = []
        for value in level:
            if isinstance(value, dict | list):
                following.extend(value.values() if isinstance(value, dict) else value)
                if count + len(following) > MAX_VALUES:
                    return f"holds more than {MAX_VALUES} values"
            elif isinstance(value, float) and not float("-inf") < value < float("inf"):
                return f"holds a number that is not finite ({value})"
        count, level = count + len(following), following
        if not level:
            return ""
    return f"is nested more than {MAX_DEPTH} levels deep"


def _custom(kind: type, value: Any) -> Any:
    if kind is np.ndarray:
        array = np.asarray(value) if isinstance(value, list) else np.empty(0, object)
        if array.dtype.kind not in "fi":
            raise ValueError(f"Expected an array of numbers, got {_short(value)}")
        return array
    if kind is not Path:
        raise NotImplementedError(f"{kind} is read from no file")
    value = str(value) if isinstance(value, Path) else value
    if not isinstance(value, str) or not 0 < len(value) <= MAX_PATH or "\0" in value:
        raise ValueError(f"Expected a path of at most {MAX_PATH} characters, got {_short(value)}")
    return Path(value)


def _explained(reason: Exception, values: Any) -> str:
    """Return "tasks[0].episodes: expected `int` >= 1, got 0" of msgspec's error."""
    text, _, place = str(reason).partition(" - at `")
    place = place.rstrip("`").removeprefix("$").removeprefix(".")
    found = _at(values, place)
    if text.startswith("Expected"):
        kind = text.partition(", got ")[2]
        came = kind if found is _LOST else _short(found)
        text = text.partition(", got ")[0] + (f", got {came}" if came else "")
    text = text[0].lower() + text[1:]
    return f"{place}: {text}" if place else text


_LOST = object()


def _at(values: Any, place: str) -> Any:
    """Return the value that msgspec calls by a place; :data:`_LOST` if it names no key."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", place):
        try:
            values = values[int(index)] if index else values[name]
        except (KeyError, IndexError, TypeError, ValueError):  # msgspec writes ... for a key
            return _LOST
    return values


def _short(value: Any) -> str:
    what = "object " if isinstance(value, dict) else "array " if isinstance(value, list) else ""
    text = f"{what}{value!r}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(reason: BaseException) -> str:
    """Return an error's text without line breaks, and not without end."""
    return f"{' '.join(str(reason).split()):.500}"


def _refused(error: _Error, problem: str, advice: str) -> VlaGymError:
    return error(f"{problem}. {advice}".rstrip() if advice else f"{problem}.")
