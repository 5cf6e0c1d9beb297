"""Folders of checkpoints: shipped ones, checksums, and the small files that others name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vla_gym.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    import torch

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


def write_weights(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
    half: bool = True,
) -> None:
    """Write model.safetensors, and SHA256SUMS over it and the folder's config.json.

    Args:
        folder: With config.json.
        tensors: Of the network.
        metadata: Of the file.
        half: In float16; else as they are.
    """
    from safetensors.torch import save_file

    file = folder / "model.safetensors"
    written = {
        name: (value.half() if half else value).contiguous().cpu()
        for name, value in tensors.items()
    }
    save_file(written, file, metadata)
    file.chmod(0o644)  # written as 0600, unfit for package data
    names = ("config.json", file.name)
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


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object.

    Raises:
        WeightsError: If the file is missing or holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(
            f"Checkpoint {path.parent} lacks {path.name}: copy or download the whole folder."
        ) from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is no JSON object: {error}") from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path} is no JSON object.")
    return found


def find_base_model(
    checkpoint: Path,
    name: str | None,
    needed: Sequence[str],
    *,
    option: str,
    given: str | Path | None,
    folders: Sequence[Path],
) -> Path:
    """Return a folder of the model that a checkpoint was made from; nothing is downloaded.

    Args:
        checkpoint: Its folder, for errors.
        name: Of the model on the hub.
        needed: Names of files that must be there.
        option: Name of the caller's option, for errors.
        given: Its value: a folder or a name on the hub; None looks in ``folders`` and for ``name``
            in huggingface_hub's cache.
        folders: Where to look first.

    Raises:
        ConfigError: If what is given lacks a file.
        WeightsError: If no folder has them all.
    """
    if given is not None:
        folders, name = [Path(given).expanduser()], str(given)
    for folder in [*folders, *_cached(name)]:
        if all((folder / file).is_file() for file in needed):
            return folder
    if given is not None:
        missing = [file for file in needed if not (folders[0] / file).is_file()]
        raise ConfigError(f"{option}={str(given)!r} lacks {', '.join(missing)}.")
    raise WeightsError(
        f"Checkpoint {checkpoint} needs {' and '.join(needed)} of {name}, which it only names: run "
        f"'hf download {name} --include \"*.json\" --local-dir {checkpoint / 'vlm'}', or give "
        f"{option}='/path/to/it'. Its weights are not needed."
    )


def _cached(name: str | None) -> list[Path]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return [Path(snapshot_download(name, local_files_only=True))] if name else []
    except (LocalEntryNotFoundError, HFValidationError):  # the second: a path
        return []


def read_vlm_config(folder: Path, model_types: Sequence[str]) -> Any:
    """Return the configuration of a VLM, as transformers reads it.

    Raises:
        WeightsError: If config.json is missing, damaged or of another model type.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # missing, damaged or foreign files raise all kinds
        raise WeightsError(f"Cannot read {folder / 'config.json'}: {error}") from error
    if config.model_type not in model_types:
        raise WeightsError(
            f"The VLM in {folder} has model_type {config.model_type!r}: expected one of "
            f"{', '.join(model_types)}."
        )
    return config


def load_tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer; no code of the folder is run, nothing is downloaded.

    Raises:
        WeightsError: If its files cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers and tokenizers raise for a broken file
        raise WeightsError(f"Cannot load the tokenizer in {folder}: {error}") from error
