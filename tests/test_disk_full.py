"""A full disk: known by whatever a library makes of it, and a run that goes on afterwards."""

from __future__ import annotations

import errno
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_target import tiny_arguments, use_toy
from safetensors import SafetensorError

from vla_gym.cli import main as cli
from vla_gym.disk_full import is_disk_full
from vla_gym_trainers.cli import main
from vla_gym_trainers.runs.run_dir import RunDir

FULL = Path("/dev/full")  # whatever is written there meets a full disk
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full (Linux)")
BIG = torch.zeros(100_000)


def _torch(path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(BIG, file)


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive, archive.open("model.pth", "w") as file:
        torch.save(BIG, file)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b"x" * 100_000),
        _torch,
        _zip,
    ],
    ids=["python", "torch", "zip"],
)
def test_known_whatever_wrote(write: Callable[[Path], None], tmp_path: Path) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # a type of its own each
        write(FULL)
    assert is_disk_full(raised.value)


def test_a_full_quota_counts_and_other_errors_do_not() -> None:
    assert is_disk_full(OSError(errno.EDQUOT, "Disk quota exceeded"))
    try:
        try:
            raise OSError(errno.ENOSPC, "no space")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904  # as torch does
    except RuntimeError as error:
        assert is_disk_full(error)
    # What save_file raises on a full disk; it would put a file in the place of /dev/full.
    text = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert is_disk_full(SafetensorError(text))
    assert not is_disk_full(OSError(errno.EACCES, "Permission denied"))
    assert not is_disk_full(RuntimeError("unexpected pos 64 vs 0"))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    use_toy(monkeypatch)


def test_a_run_says_how_to_go_on_and_goes_on(tmp_path, toy, monkeypatch, capsys):
    # The replay of the third checkpoint finds the disk full.
    import vla_gym_trainers.td3.checkpoint as checkpoint_module

    def open_(path: Any, mode: str) -> Any:
        is_third = "000000144" in str(path) and str(path).endswith("replay.pkl")
        return open(FULL if is_third else path, mode)

    monkeypatch.setattr(checkpoint_module, "open", open_, raising=False)
    assert main(["td3", "--run-dir", str(tmp_path), *tiny_arguments()]) == 2
    said = capsys.readouterr().err
    assert f"The disk of {tmp_path} is full. Its newest checkpoint is 000000096" in said
    assert f"vla-gym-train td3 --resume {tmp_path}" in said
    assert "Traceback" not in said
    run = RunDir(tmp_path)
    assert sorted(run.checkpoint_dir.iterdir()) == run.checkpoints()
    monkeypatch.undo()
    use_toy(monkeypatch)
    assert main(["td3", "--resume", str(tmp_path)]) == 0
    assert run.card.exists()


def test_metrics_that_cannot_be_written_end_a_run_too(tmp_path, toy, capsys):
    (tmp_path / "metrics.jsonl").symlink_to(FULL)
    assert main(["td3", "--run-dir", str(tmp_path), *tiny_arguments(checkpoint_every=1000)]) == 2
    assert "is full. It has no checkpoint yet." in capsys.readouterr().err


def test_without_room_for_the_settings_there_is_no_run(tmp_path, toy, monkeypatch, capsys):
    def write_text(path: Path, text: str, encoding: str) -> None:
        path.touch()
        with open(FULL, "w", encoding=encoding) as file:
            file.write(text)

    with monkeypatch.context() as context:
        context.setattr(Path, "write_text", write_text)
        assert main(["td3", "--run-dir", str(tmp_path), *tiny_arguments()]) == 2
    assert "is full: free some space and run the command again" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.tmp"))


def test_commands_say_so(monkeypatch, capsys):
    def command(_: Any) -> int:
        FULL.write_text("x")
        return 0

    monkeypatch.setitem(cli.COMMANDS, "eval", command)
    assert cli.main(["eval"]) == 2
    assert "error: A disk is full" in capsys.readouterr().err
