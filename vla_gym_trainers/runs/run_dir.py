"""A run's folder: names of its files, whole checkpoints only, one process at a time."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field

from vla_gym.errors import ConfigError, VlaGymError, WeightsError
from vla_gym.files import only_process, sync
from vla_gym.outside import Count, Object, Text, read_json

# Lists a checkpoint's files with their sizes; written last.
_MANIFEST = "files.json"
#: Raised when the content of ``state.json`` changes, so that an old one is refused, not misread.
FORMAT = 2


class Checkpoint(Struct):
    """Where a run goes on, as its ``state.json`` says.

    Attributes:
        format: :data:`FORMAT`.
        step: Steps until then.
        state: Plain data that the trainer gave to :meth:`.run.Run.new_checkpoint`.
        run: What the run itself keeps.
        folder: Holds the trainer's files.
    """

    format: int
    step: Count
    state: Object = field(name="trainer")
    run: Object
    folder: Path = Path()

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """Read a checkpoint's ``state.json``.

        Raises:
            WeightsError: If it is missing, damaged or of another format.
        """
        found = read_json(
            folder / "state.json", cls, WeightsError, f"{folder} is no whole checkpoint."
        )
        check_format(folder, found.format, FORMAT)
        found.folder = folder
        return found


def check_format(folder: Path, found: int, expected: int) -> None:
    """Raise a WeightsError if a checkpoint's content is not that of this version."""
    if found != expected:
        raise WeightsError(
            f"{folder} has format {found}, expected {expected}: begin a new run, or go on with the "
            "vla_gym version that wrote it."
        )


@contextmanager
def restoring(folder: Path) -> Iterator[None]:
    """Bring a trainer back to what it wrote into a checkpoint's folder.

    Raises:
        WeightsError: In place of whatever is raised by what is damaged or of another version.
    """
    try:
        yield
    except VlaGymError:
        raise
    except Exception as error:  # OS, zip, pickle, key and shape errors alike
        raise WeightsError(
            f"{folder} is no whole checkpoint of this version and run: {error}"
        ) from error


class RunDir:
    """The folder of one training run.

    Its files::

        config.json       every setting, resolved
        metrics.jsonl     one line a log, see docs/metrics.md
        tensorboard/      the same numbers
        checkpoints/      000005000/, ...: the newest few, all that resuming needs; named by the
                          steps so far
        best.*            the policy with the best closed-loop evaluation, if there was any
        last.*            the policy at the end
        policy.*          the one to use: the best if there is one, else the last
        vla/, adapters/   the VLA that the policy was trained with, and rl_token/ its encoder,
                          where td3 trained them too (best_vla.pt: those of the best)
        videos/           films, if asked for
        card.json         the result card

    A checkpoint is written under another name, flushed to disk and renamed, so whatever bears a
    checkpoint's name is whole, whenever the process died. One that was damaged later, say by a
    copy that broke off, lacks files of its ``files.json`` and is left out with a warning.
    """

    def __init__(self, path: Path) -> None:
        """Name a folder; nothing is created."""
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoint_dir = path / "checkpoints"
        self.best = path / "best.safetensors"
        self.last = path / "last.safetensors"
        self.best_vla = path / "best_vla.pt"
        self.policy = path / "policy.safetensors"
        self.videos = path / "videos"
        self.card = path / "card.json"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Create the folder and keep other processes out of it.

        Raises:
            ConfigError: If another process trains in this folder.
        """
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        busy = (
            f"Another process is training in {self.path}: wait for it, or give another --run-dir."
        )
        with only_process(self.path / ".lock", busy):
            self._sweep()
            yield

    def _sweep(self) -> None:
        """Remove what a process that died left half done."""
        for leftover in self.checkpoint_dir.glob(".*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for leftover in self.path.glob("*.tmp"):
            leftover.unlink(missing_ok=True)

    def checkpoints(self) -> list[Path]:
        """Return the whole checkpoints, oldest first; warn of others."""
        named = sorted(self.checkpoint_dir.glob("[0-9]*"))
        whole = [path for path in named if _is_whole(path)]
        for path in set(named) - set(whole):
            warnings.warn(f"{path} is no whole checkpoint: it is left out.", stacklevel=2)
        return whole

    def keep_best(self, draft: Path) -> None:
        """Put the best policy so far into a checkpoint, too."""
        for file in (self.best, self.best_vla):
            if file.is_file():
                _link(file, draft / file.name)

    def go_back_to(self, checkpoint: Path | None) -> None:
        """Remove what came after a checkpoint; if there is none, an earlier run's results."""
        later = [
            path
            for path in self.checkpoint_dir.glob("[0-9]*")
            if checkpoint is not None and path.name > checkpoint.name
        ]
        outdated = [self.best, self.best_vla, *([self.card] if checkpoint is None else [])]
        if later:  # what the run's end has left is of what is dropped
            outdated += [self.card, self.policy, self.last]
            for name in ("vla", "adapters", "rl_token"):
                shutil.rmtree(self.path / name, ignore_errors=True)
        for file in outdated:
            file.unlink(missing_ok=True)
        if checkpoint is None:
            return
        for path in later:
            self._remove(path)
        for file in (self.best, self.best_vla):
            if (checkpoint / file.name).is_file():
                _link(checkpoint / file.name, file)

    @contextmanager
    def new_checkpoint(self, step: int, keep: int) -> Iterator[Path]:
        """Give a folder to write a checkpoint into; it counts once the block ends without error.

        Its steps name it; ``keep`` checkpoints stay, this one included.
        """
        final = self.checkpoint_dir / f"{step:09d}"
        draft = self.checkpoint_dir / f".{final.name}.draft"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        try:
            yield draft
            sizes = {file.name: file.stat().st_size for file in draft.iterdir()}
            (draft / _MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")
            for file in draft.iterdir():
                sync(file)
            old = self._aside(final)
            draft.rename(final)
            sync(self.checkpoint_dir)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        for old in self.checkpoints()[:-keep]:
            self._remove(old)

    def _remove(self, checkpoint: Path) -> None:
        # Renamed first: a folder with a checkpoint's name is never half deleted.
        shutil.rmtree(self._aside(checkpoint), ignore_errors=True)

    def _aside(self, checkpoint: Path) -> Path:
        """Rename a checkpoint, if it is there; it counts no longer."""
        trash = checkpoint.with_name(f".{checkpoint.name}.trash")
        shutil.rmtree(trash, ignore_errors=True)  # of a process that was killed over it
        if checkpoint.exists():
            checkpoint.rename(trash)
        return trash


def _link(source: Path, target: Path) -> None:
    """Give a file that is only ever replaced as a whole another name, or copy it."""
    try:
        target.hardlink_to(source)
    except OSError:  # a file system without hard links
        shutil.copy(source, target)


def _is_whole(checkpoint: Path) -> bool:
    try:
        sizes = read_json(checkpoint / _MANIFEST, dict[Text, Count])
        return all((checkpoint / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ConfigError):
        return False
