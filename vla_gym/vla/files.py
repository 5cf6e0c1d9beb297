"""Checkpoint folders: quiet loading, half-precision saving, checksums."""

from __future__ import annotations

import hashlib
from pathlib import Path

from vla_gym.errors import WeightsError

CHECKSUMS = "SHA256SUMS"
WEIGHTS_ROOT = Path(__file__).parent.parent / "weights"


def resolve_weights(name_or_path: str | Path, suffix: str = "") -> Path:
    """Return the folder of a shipped checkpoint or of a user's own.

    Args:
        name_or_path: Name of a folder in ``vla_gym/weights``, or a path to a folder.
        suffix: Appended to a name, not to a path (``"-rl-token"``).

    Raises:
        WeightsError: If neither exists or the folder has no config.json.
    """
    shipped = WEIGHTS_ROOT / f"{name_or_path}{suffix}"
    for folder in (shipped, Path(name_or_path).expanduser()):
        if (folder / "config.json").is_file():
            return folder.resolve()
    known = sorted(
        path.parent.name.removesuffix(suffix)
        for path in WEIGHTS_ROOT.glob(f"*{suffix}/config.json")
        if suffix or not path.parent.name.endswith("-rl-token")
    )
    raise WeightsError(
        f"No checkpoint {str(name_or_path)!r}: expected a folder with config.json and "
        f"model.safetensors, or one of the shipped names: {', '.join(known) or 'none'}."
    )


def write_checksums(folder: Path) -> None:
    """Write SHA256SUMS over config.json and model.safetensors of a checkpoint folder."""
    names = ("config.json", "model.safetensors")
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (folder / CHECKSUMS).write_text("".join(lines))


def verify_checksums(folder: Path) -> None:
    """Compare a checkpoint with its SHA256SUMS; a folder without that file is accepted.

    Raises:
        WeightsError: If a file is missing or differs.
    """
    sums = folder / CHECKSUMS
    if not sums.is_file():
        return
    for line in sums.read_text().splitlines():
        expected, _, name = line.partition("  ")
        path = folder / name
        if not path.is_file():
            raise WeightsError(f"Checkpoint {folder} lacks {name}: copy or download it again.")
        got = hashlib.sha256(path.read_bytes()).hexdigest()
        if got != expected:
            raise WeightsError(
                f"Checkpoint file {path} is corrupt: expected sha256 {expected[:12]}..., got "
                f"{got[:12]}...: restore it, or delete {CHECKSUMS} if you changed it on purpose."
            )
