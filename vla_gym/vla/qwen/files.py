"""QwenOFT checkpoint folders, as AlphaBrain and starVLA publish them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.vla.files import find_base_model
from vla_gym.vla.statistics import read_statistics

_CONFIGS = {"alphabrain": "framework_config.yaml", "starvla": "config.yaml"}
_WEIGHT_SUFFIXES = (".safetensors", ".pt")
_VLM_FOLDERS = ("vlm_pretrained", "qwen_pretrained")


@dataclass(frozen=True)
class QwenOFTFiles:
    """Where the parts of a policy are, and what its configuration says.

    Attributes:
        folder: The run's folder; its name is the policy's.
        weights: File or folder with all weights.
        vlm: Folder with the VLM's config.json, preprocessor and tokenizer.
        chunk_len: Actions of a chunk.
        cot_prompt: See :class:`~vla_gym.vla.qwen.prompt.QwenPrompts`.
        image_size: Height and width that the policy resizes images to, or None.
        norm_mode: ``"q99"`` or ``"min_max"``, the default of the policy's own client.
        statistics: By data set.
    """

    folder: Path
    weights: Path
    vlm: Path
    chunk_len: int
    cot_prompt: str | None
    image_size: tuple[int, int] | None
    norm_mode: str
    statistics: dict[str, dict[str, Any]]


def find_files(path: Path, base_vlm: str | Path | None = None) -> QwenOFTFiles:
    """Recognise the layout of a checkpoint.

    AlphaBrain: framework_config.yaml, dataset_statistics.json, model.safetensors (or
    pytorch_model.pt) and ``vlm_pretrained/`` in one folder. starVLA: config.yaml and
    dataset_statistics.json, weights of several steps in ``checkpoints/``, and the VLM elsewhere.

    Args:
        path: The run's folder, or one file of weights in it.
        base_vlm: Folder of the VLM; by default ``vlm_pretrained/``, or what the configuration
            names, if that is a folder of this machine or in the Hugging Face cache.

    Raises:
        WeightsError: If a part is missing or damaged, or it is no QwenOFT.
        ConfigError: If there are several files of weights and the path is a folder.
    """
    folder = path
    if path.is_file():
        folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    layout = next((found for found, name in _CONFIGS.items() if (folder / name).is_file()), None)
    if layout is None:
        raise WeightsError(
            f"No QwenOFT checkpoint in {folder}: expected framework_config.yaml (AlphaBrain) or "
            "config.yaml (starVLA), and dataset_statistics.json beside it."
        )
    config = _Config(folder / _CONFIGS[layout])
    framework = config.get("framework.name")
    if framework is not None and str(framework).lower() != "qwenoft":
        raise WeightsError(
            f"{config.file} describes a policy of the framework {framework!r}: this backend is for "
            "QwenOFT."
        )
    configured = config.get("framework.qwenvl.base_vlm")
    return QwenOFTFiles(
        folder=folder,
        weights=path if path.is_file() else _weights(folder, layout),
        vlm=find_base_model(
            folder,
            configured,
            ("config.json",),
            option="base_vlm",
            given=base_vlm,
            folders=[
                folder / name for name in (*_VLM_FOLDERS, *([configured] if configured else []))
            ],
        ),
        chunk_len=_chunk_len(config, layout),
        cot_prompt=config.get("datasets.vla_data.CoT_prompt"),
        image_size=_image_size(config),
        # AlphaBrain's client takes q01 and q99 unless the statistics say otherwise; starVLA's
        # client for LIBERO always takes minimum and maximum.
        norm_mode="q99" if layout == "alphabrain" else "min_max",
        statistics=read_statistics(folder),
    )


def module_name(name: str) -> str | None:
    """Return the name in :class:`~vla_gym.vla.qwen.model.QwenOFT` of a checkpoint's tensor.

    None for the language model's output layer, which no action depends on.
    """
    for prefix in ("qwen_vl_interface.model.", "vlm.model."):  # the second was AlphaBrain's first
        if name.startswith(prefix):
            rest = name.removeprefix(prefix)
            return None if rest == "lm_head.weight" else f"vlm.{rest.removeprefix('model.')}"
    return name


class _Config:
    """A YAML file, read by dotted names."""

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            self._values = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise WeightsError(f"Cannot read {file}: {error}") from error
        if not isinstance(self._values, Mapping):
            raise WeightsError(f"Expected a mapping in {file}, got {self._values!r:.80}.")

    def get(self, name: str) -> Any:
        """Return a value, or None where it or a part of its path is absent."""
        value: Any = self._values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str) and "${" in value:
            raise WeightsError(
                f"{name} in {self.file} refers to another value ({value}): write the value itself."
            )
        return value


def _chunk_len(config: _Config, layout: str) -> int:
    """Return the length of a chunk: the windows' or, in newer starVLA, the horizon."""
    part = "framework.action_model."
    windows = [config.get(f"{part}{when}_action_window_size") for when in ("past", "future")]
    horizon = config.get(f"{part}action_horizon")
    if layout == "alphabrain" or horizon is None:
        found = None if windows[1] is None else (windows[0] or 0) + 1 + windows[1]
    else:
        found = horizon
    if not isinstance(found, int) or found < 1:
        raise WeightsError(
            f"Cannot tell the length of a chunk from {config.file}: expected "
            f"{part}future_action_window_size or {part}action_horizon, got {found!r}."
        )
    return found


def _image_size(config: _Config) -> tuple[int, int] | None:
    """Return (height, width), or None where the policy's own code does not resize."""
    for name in ("image_size", "obs_image_size"):
        found = config.get(f"datasets.vla_data.{name}")
        if not found:
            continue
        if isinstance(found, int):
            return found, found
        if isinstance(found, list) and len(found) == 2 and all(isinstance(x, int) for x in found):
            return found[1], found[0]  # Pillow's order is width, height
        raise WeightsError(f"Expected two sizes in {name} of {config.file}, got {found!r}.")
    return None


def _weights(folder: Path, layout: str) -> Path:
    if layout == "alphabrain":
        legacy = folder / "pytorch_model.pt"
        safe = any(folder.glob("model.safetensors*"))
        return legacy if legacy.is_file() and not safe else folder
    where = folder / "checkpoints"
    found = sorted(f for f in where.glob("*") if f.suffix in _WEIGHT_SUFFIXES)
    if not found:
        raise WeightsError(f"No weights in {where}: expected a file *.safetensors or *.pt.")
    if len(found) > 1:
        raise ConfigError(
            f"Several files of weights in {where}: give the path of one of "
            f"{', '.join(f.name for f in found)} instead of the folder."
        )
    return found[0]
