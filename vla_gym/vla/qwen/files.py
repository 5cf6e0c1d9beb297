"""QwenOFT checkpoint folders, as AlphaBrain and starVLA publish them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import ChunkLength, ImageSide, Text, read_yaml
from vla_gym.vla.files import find_base_model
from vla_gym.vla.statistics import Statistics, read_statistics

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
    statistics: Statistics


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
    file = folder / _CONFIGS[layout]
    config = read_yaml(file, _Config, WeightsError)
    framework, images = config.framework.name, config.datasets.vla_data
    if framework is not None and framework.lower() != "qwenoft":
        raise WeightsError(
            f"{file} describes a policy of the framework {framework!r}: this backend is for "
            "QwenOFT."
        )
    configured = config.framework.qwenvl.base_vlm
    for value in (configured, images.prompt):
        if value is not None and "${" in value:
            raise WeightsError(f"{file} refers to another value ({value}): write the value itself.")
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
        chunk_len=_chunk_len(config.framework.action_model, layout, file),
        cot_prompt=images.prompt,
        image_size=_image_size(images, file),
        # AlphaBrain's client takes q01 and q99 unless the statistics say otherwise; starVLA's
        # client for LIBERO always takes minimum and maximum.
        norm_mode="q99" if layout == "alphabrain" else "min_max",
        statistics=read_statistics(folder),
    )


def module_name(name: str, final_norm: bool) -> str | None:
    """Return the name in :class:`~vla_gym.vla.qwen.model.QwenOFT` of a checkpoint's tensor.

    None for what no action depends on: the language model's output layer and, without
    ``final_norm``, its last norm.
    """
    unused = ("lm_head.weight",) if final_norm else ("lm_head.weight", "language_model.norm.weight")
    for prefix in ("qwen_vl_interface.model.", "vlm.model."):  # the second was AlphaBrain's first
        if name.startswith(prefix):
            rest = name.removeprefix(prefix).removeprefix("model.")
            return None if rest in unused else f"vlm.{rest}"
    return name


class _ActionModel(Struct):
    past_action_window_size: Annotated[int, Meta(ge=0, le=1000)] | None = None
    future_action_window_size: Annotated[int, Meta(ge=0, le=1000)] | None = None
    action_horizon: ChunkLength | None = None


class _QwenVL(Struct):
    base_vlm: Text | None = None


class _Framework(Struct):
    name: str | None = None
    qwenvl: _QwenVL = field(default_factory=_QwenVL)
    action_model: _ActionModel = field(default_factory=_ActionModel)


class _Images(Struct):
    prompt: str | None = field(name="CoT_prompt", default=None)
    image_size: ImageSide | Annotated[list[ImageSide], Meta(max_length=2)] | None = None
    obs_image_size: ImageSide | Annotated[list[ImageSide], Meta(max_length=2)] | None = None


class _Data(Struct):
    vla_data: _Images = field(default_factory=_Images)


class _Config(Struct):
    framework: _Framework = field(default_factory=_Framework)
    datasets: _Data = field(default_factory=_Data)


def _chunk_len(model: _ActionModel, layout: str, file: Path) -> int:
    """Return the length of a chunk: the windows' or, in newer starVLA, the horizon."""
    if layout != "alphabrain" and model.action_horizon is not None:
        return model.action_horizon
    if model.future_action_window_size is None:
        raise WeightsError(
            f"Cannot tell the length of a chunk from {file}: expected "
            "framework.action_model.future_action_window_size or action_horizon."
        )
    return (model.past_action_window_size or 0) + 1 + model.future_action_window_size


def _image_size(data: _Images, file: Path) -> tuple[int, int] | None:
    """Return (height, width), or None where the policy's own code does not resize."""
    found = data.image_size or data.obs_image_size
    if not found:
        return None
    if isinstance(found, list) and len(found) != 2:
        raise WeightsError(f"Expected two sizes in image_size of {file}, got {found!r:.80}.")
    # Pillow's order is width, height.
    return (found, found) if isinstance(found, int) else (found[1], found[0])


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
