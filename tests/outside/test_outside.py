"""The door itself: files, JSON and YAML that no reader should have to think of."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from spoilt_files import refused

from vla_gym import outside
from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import Object, Size, parse_json, read_json, read_yaml, to_type


class Part(msgspec.Struct):
    size: Size = 1
    names: dict[str, list[Size]] = {}
    where: Path | None = None


def written(folder: Path, text: str | bytes, name: str = "a.json") -> Path:
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"size": 0}', "a.json: size: expected `int` >= 1, got 0. Try it."),
        ('{"size": true}', "size: expected `int`, got True"),
        ('{"size": 1e400}', "no valid JSON: Number out of range"),
        ('{"size": NaN}', "no valid JSON"),
        ('{"names": {"a": [1, null]}}', "names[...][1]: expected `int`, got `null`"),
        ('{"where": 5}', "where: expected a path of at most 1024 characters, got 5"),
        ('{"where": "a\\u0000"}', "where: expected a path"),
        ("[]", "a.json: expected `object`, got array []"),
        ("[" * 100_000, "no valid JSON"),
        ("[" * 500 + "]" * 500, "nested more than 64 levels deep"),
        (b"\xff\xfe", "no valid JSON"),
        ("", "no valid JSON"),
    ],
)
def test_json_is_refused_in_one_line(text: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        read_json(written(tmp_path, text), Part, WeightsError, "Try it.")
    message = str(caught.value)
    assert expected in message and message.count("\n") == 0 and len(message) < 400
    assert message.startswith(str(tmp_path / "a.json")) and message.endswith("Try it.")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "is not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("a: " + "[" * 5000, "is not valid YAML"),
        ("a: 2024-13-45", "is not valid YAML"),
        ("a: !!bool maybe", "is not valid YAML"),
        ("a: !!timestamp x", "is not valid YAML"),
        ("a: !!int ''", "is not valid YAML"),
        ("a: .nan", "not finite"),
        ("1: a", "expected `str`"),
        ("text", "expected `object`, got 'text'"),
        ("a: &a [*a]", "nested more than"),
        (BOMB, "holds more than 2000000 values"),
    ],
)
@pytest.mark.timeout(20, func_only=True)  # not the compiling of what all tests need
def test_yaml_is_refused_in_one_line(text: str, expected: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    refused(lambda: read_yaml(file, Object), expected, kind=ConfigError)


@pytest.mark.timeout(20, func_only=True)  # not the compiling of what all tests need
def test_what_is_no_file_of_bounded_size_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    paths = {pipe: "no regular file", Path("/dev/zero"): "no regular file"}
    paths |= {tmp_path: "cannot be read", tmp_path / "none": "does not exist"}
    paths |= {tmp_path / ("a" * 5000): "cannot be read"}
    for path, expected in paths.items():
        with pytest.raises(ConfigError, match=expected):
            read_json(path, Object)
    monkeypatch.setattr(outside, "MAX_BYTES", 10)
    assert read_json(written(tmp_path, '{"a": 12}'), Object) == {"a": 12}
    with pytest.raises(ConfigError, match="has 11 bytes: expected at most 10"):
        read_json(written(tmp_path, '{"a": 1234}'), Object)


def test_what_fits_becomes_the_type() -> None:
    @dataclasses.dataclass
    class Settings:
        where: Path
        share: float = 0.5
        ids: tuple[int, ...] = ()

        def __post_init__(self) -> None:
            if self.share > 1.0:
                raise ConfigError(f"share must be at most 1, got {self.share}.")

    found = parse_json('{"where": "a/b", "share": 1, "ids": [1, 2]}', Settings, "it")
    assert found == Settings(Path("a/b"), 1.0, (1, 2))
    with pytest.raises(WeightsError, match=r"^it: share must be at most 1, got 2"):
        to_type({"where": "a", "share": 2}, Settings, "it", WeightsError)
