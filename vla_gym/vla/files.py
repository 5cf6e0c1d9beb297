"""Folders of checkpoints: shipped ones, checksums, and the small files that others name."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct

from vla_gym import outside
from vla_gym.errors import ConfigError, WeightsError
from vla_gym.files import replacing
from vla_gym.outside import Layers, OpenFraction, Size, file_sha256

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

CHECKSUMS = "SHA256SUMS"
WEIGHTS_ROOT = Path(__file__).parent.parent / "weights"


def resolve_weights(name_or_path: str | Path, suffix: str = "") -> Path:
    """Return the folder of a shipped checkpoint or of a user's own.

    Args:
        name_or_path: Name of a folder in ``vla_gym/weights``, or a path to a folder, which a
            :class:`~pathlib.Path` always is.
        suffix: Appended to a name, not to a path (``"-rl-token"``).

    Raises:
        WeightsError: If neither exists, or the folder has no config.json or is a training run's.
    """
    outside.check_path(name_or_path)
    own = Path(os.path.expanduser(name_or_path))
    is_name = isinstance(name_or_path, str) and name_or_path == own.name
    for folder in (WEIGHTS_ROOT / f"{own}{suffix}", own) if is_name else (own,):
        if os.path.isfile(folder / "config.json"):  # where a name is too long, Path's raises
            if (folder / "metrics.jsonl").is_file() and (folder / "checkpoints").is_dir():
                inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
                raise WeightsError(
                    f"{folder} is a training run: expected a folder in it that is a checkpoint; "
                    f"there are: {', '.join(inside) or 'none'}."
                )
            return folder.resolve()
    known = sorted(
        path.parent.name.removesuffix(suffix)
        for path in WEIGHTS_ROOT.glob(f"*{suffix}/config.json")
        if suffix or not path.parent.name.endswith("-rl-token")
    )
    raise WeightsError(
        f"No checkpoint {str(name_or_path)!r}: expected a folder with config.json and "
        f"model.safetensors, or, as a str, one of the shipped names: {', '.join(known) or 'none'}."
    )


def last_written(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return names, numbers, sizes and times of a file, or of a folder and the folders in it.

    They are others once it is written again.
    """
    try:
        stats = [(str(p), p.stat()) for p in (path, *path.glob("*"), *path.glob("*/*"))]
    except OSError:  # nothing there, a link to nowhere: what is wrong tells who reads it
        return ()
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats))


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    *,
    half: bool = True,
) -> None:
    """Write config.json, model.safetensors, in float16 if ``half``, and SHA256SUMS over both.

    Files that are there stay until all three are written, and are then replaced one by one; until
    the last one is, there are no checksums.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    written = {
        name: (value.half() if half else value).contiguous().cpu()
        for name, value in tensors.items()
    }
    config_file, weights_file = folder / "config.json", folder / "model.safetensors"
    sums_file = folder / CHECKSUMS
    with (
        replacing(sums_file) as sums,
        replacing(config_file) as text,
        replacing(weights_file) as weights,
    ):
        text.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(written, weights)
        weights.chmod(0o644)  # written as 0600, unfit for package data
        pairs = (text, config_file), (weights, weights_file)
        sums.write_text("".join(f"{file_sha256(new)}  {file.name}\n" for new, file in pairs))
        sums_file.unlink(missing_ok=True)


def verify_checksums(folder: Path) -> None:
    """Compare a checkpoint with its SHA256SUMS; a folder without that file is accepted.

    Raises:
        WeightsError: If a file is missing or differs, or lies elsewhere.
    """
    sums = folder / CHECKSUMS
    if not sums.is_file():
        return
    for line in outside.read_bytes(sums, WeightsError).decode(errors="replace").splitlines():
        if not line.strip():
            continue
        expected, _, name = line.partition("  ")
        path = folder / name
        if os.path.basename(name) != name:
            raise WeightsError(f"{sums}: expected names of files beside it, got {name!r:.80}.")
        if not path.is_file():
            raise WeightsError(f"Checkpoint {folder} lacks {name}: copy or download it again.")
        got = file_sha256(path)
        if got != expected:
            raise WeightsError(
                f"Checkpoint file {path} is corrupt: expected sha256 {expected[:12]}..., got "
                f"{got[:12]}...: restore it, or delete {CHECKSUMS} if you changed it on purpose."
            )


def read_json(path: Path, kind: type[T]) -> T:
    """Return what a checkpoint's JSON file holds; see :func:`vla_gym.outside.read_json`.

    Raises:
        WeightsError: If the file is missing or holds something else.
    """
    return outside.read_json(path, kind, WeightsError, "Copy or download the whole checkpoint.")


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
        if not folders[0].is_dir():
            raise ConfigError(
                f"{option}={str(given)!r} is no folder, nor in huggingface_hub's cache: expected a "
                f"folder with {', '.join(needed)}, or run 'hf download {given}'."
            )
        missing = [file for file in needed if not (folders[0] / file).is_file()]
        raise ConfigError(f"{option}={str(given)!r} lacks {', '.join(missing)}.")
    advice = f"give {option}='/path/to/it'"
    if name and re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        command = (
            f'hf download {name} --include "*.json" --local-dir {shlex.quote(str(folders[0]))}'
        )
        advice = f"run '{command}', or {advice}"
    raise WeightsError(
        f"Checkpoint {checkpoint} needs {' and '.join(needed)} of {name or 'its VLM'}, which it "
        f"does not hold: {advice}. Its weights are not needed."
    )


def _cached(name: str | None) -> list[Path]:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return [Path(snapshot_download(name, local_files_only=True))] if name else []
    except (LocalEntryNotFoundError, HFValidationError):  # the second: a path
        return []


class _Tower(Struct):
    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Layers | None = None
    depth: Layers | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    num_heads: Size | None = None
    vocab_size: Size | None = None
    rms_norm_eps: OpenFraction | None = None
    hidden_act: str | None = None


class _VLMConfig(_Tower):
    model_type: str | None = None
    text_config: _Tower | None = None
    vision_config: _Tower | None = None


def read_vlm_config(folder: Path, model_types: Sequence[str]) -> Any:
    """Return the configuration of a VLM, as transformers reads it.

    Raises:
        WeightsError: If config.json is missing, damaged or of another model type.
    """
    from transformers import AutoConfig

    read_json(folder / "config.json", _VLMConfig)
    try:
        config = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # missing, damaged or foreign files raise all kinds
        raise WeightsError(
            f"Cannot read {folder / 'config.json'}: {outside.one_line(error)}"
        ) from error
    if config.model_type not in model_types:
        raise WeightsError(
            f"The VLM in {folder} has model_type {config.model_type!r}: expected one of "
            f"{', '.join(model_types)}."
        )
    return config


def load_tokenizer(folder: Path) -> Any:
    """Return a folder's tokenizer; no code of the folder is run, nothing is downloaded.

    Raises:
        WeightsError: If its files cannot be read, or it has no padding token.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        tokenizer("put the bowl on the plate")  # its settings are looked at only now
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # whatever they raise for a broken file; a panic is no Exception
        raise WeightsError(
            f"Cannot load the tokenizer in {folder}: {outside.one_line(error)}"
        ) from error
    if tokenizer.pad_token_id is None:
        raise WeightsError(f"The tokenizer in {folder} has no padding token: expected one.")
    return tokenizer
