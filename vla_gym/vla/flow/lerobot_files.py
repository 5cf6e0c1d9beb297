"""A policy as LeRobot publishes it: config.json, processors and their statistics.

A folder holds ``config.json``, ``model.safetensors``, ``policy_preprocessor.json`` and
``policy_postprocessor.json``; those two name safetensors files with the statistics that states and
actions were normalised with. Folders from before the processors carry the statistics among the
weights. Prompt's tokenizer and VLM's configuration are not in it, they are named only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta, Struct, field

from vla_gym.errors import WeightsError
from vla_gym.outside import ChunkLength, Fraction, ImageSide, Layers, PositiveFloat, Size, Text
from vla_gym.vla.base import ACTION_SIZE, PROPRIO_SIZE
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.files import read_json
from vla_gym.vla.statistics import MODES, Normalizer

STATE, ACTION, IMAGES = "observation.state", "action", "observation.images."
WEIGHTS = "model.safetensors"

# Last part of an image feature's name -> camera. Those of lerobot's and openpi's LIBERO data sets,
# and of the published pi0 base model, whose third camera LIBERO does not have.
_VIEWS: dict[str, str | None] = {
    "image": "agentview",
    "agentview_image": "agentview",
    "base_0_rgb": "agentview",
    "image2": "wrist",
    "wrist_image": "wrist",
    "robot0_eye_in_hand_image": "wrist",
    "left_wrist_0_rgb": "wrist",
    "right_wrist_0_rgb": None,
}
# lerobot's name of a way to normalise -> that of vla_gym.vla.statistics.
_MODES = {"MEAN_STD": "mean_std", "MIN_MAX": "min_max", "QUANTILES": "q99"}


class Feature(Struct):
    """One input or output."""

    shape: Annotated[list[Size], Meta(min_length=1, max_length=8)]
    type: str | None = None


class GemmaSizes(Struct, omit_defaults=True):
    """Sizes of a Gemma or SigLIP that has no name."""

    hidden_size: Size | None = None
    intermediate_size: Size | None = None
    num_hidden_layers: Layers | None = None
    num_attention_heads: Size | None = None
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size | None = None
    patch_size: Size | None = None


# Settings that there is no code for, as all published LIBERO policies have them.
_IMPLEMENTED = {
    "attention_mode": "cross_attn",
    "add_image_special_tokens": False,
    "use_relative_actions": False,
    "adapt_to_pi_aloha": False,
}


class PolicyConfig(Struct):
    """config.json: what the three backends need of it; absent values are lerobot's defaults."""

    type: str | None = None
    input_features: dict[str, Feature] | None = None
    output_features: dict[str, Feature] | None = None
    normalization_mapping: dict[str, str] | None = None
    chunk_size: ChunkLength = 50
    num_steps: ChunkLength = 10
    num_inference_steps: ChunkLength = 10
    tokenizer_max_length: Annotated[int, Meta(ge=1, le=8192)] | None = None
    max_state_dim: Annotated[int, Meta(ge=PROPRIO_SIZE, le=4096)] = 32
    max_action_dim: Annotated[int, Meta(ge=ACTION_SIZE, le=4096)] = 32
    min_period: PositiveFloat = 4e-3  # shortest and longest of the time embedding
    max_period: PositiveFloat = 4.0
    # SmolVLA's
    vlm_model_name: Text | None = None
    attention_mode: str = "cross_attn"
    add_image_special_tokens: bool = False
    resize_imgs_with_padding: tuple[ImageSide, ImageSide] | None = None
    num_vlm_layers: Annotated[int, Meta(ge=-1, le=1024)] = 16  # of its text model; 0 or less: all
    num_expert_layers: int = -1
    expert_width_multiplier: Annotated[float, Meta(gt=0.0, le=8.0)] = 0.75  # of the VLM's width
    # Every n-th layer of the expert sees the actions too; 0 or less: none.
    self_attn_every_n_layers: Annotated[int, Meta(ge=-1, le=1024)] = 2
    # pi0's and pi0.5's
    use_relative_actions: bool | None = False
    adapt_to_pi_aloha: bool | None = False
    paligemma_variant: str | GemmaSizes = "gemma_2b"
    action_expert_variant: str | GemmaSizes = "gemma_300m"
    vision_config: GemmaSizes = field(default_factory=GemmaSizes)
    image_resolution: tuple[ImageSide, ImageSide] | None = None


class _StepConfig(Struct):
    rename_map: dict[str, str] | None = None
    norm_map: dict[str, str] | None = None
    eps: Fraction | None = None
    tokenizer_name: Text | None = None


class _Step(Struct):
    registry_name: str | None = None
    state_file: Text | None = None
    config: _StepConfig | None = None


class _Processor(Struct):
    steps: Annotated[list[_Step], Meta(max_length=100)] = []


class LeRobotPolicyFiles:
    """What a policy's folder says, apart from the weights.

    Attributes:
        folder: The folder.
        config: config.json.
        views: Cameras in the order in which the network sees them, e.g. ("agentview", "wrist").
        image_size: Side in pixels of the images of the training data.
        state: Normalisation of the proprioception.
        action: Normalisation of the actions.
        backbone: Name of the VLM on the hub, which the prompt's tokenizer belongs to.
    """

    def __init__(self, folder: Path, policy_type: str) -> None:
        """Read and check the folder's files; ``policy_type`` is the ``type`` in config.json.

        Raises:
            WeightsError: If a file is missing or no JSON, the policy is of another type, its
                features are of other sizes or of unknown cameras, or statistics are missing.
        """
        self.folder = folder
        self.config = read_json(folder / "config.json", PolicyConfig)
        if self.config.type != policy_type:
            raise WeightsError(
                f"Checkpoint {folder} has type {self.config.type!r} in config.json: "
                f"expected {policy_type!r}, as lerobot's policies have it."
            )
        self._steps = {
            name: step
            for file in ("policy_preprocessor.json", "policy_postprocessor.json")
            if (folder / file).is_file()
            for step in read_json(folder / file, _Processor).steps
            if (name := step.registry_name)
        }
        self._check_implemented()
        self._check_size(self.config.input_features, STATE, PROPRIO_SIZE)
        self._check_size(self.config.output_features, ACTION, ACTION_SIZE)
        self.views, self.image_size = self._read_cameras()
        self.state = self._read_normalizer("normalizer_processor", "STATE", STATE, PROPRIO_SIZE)
        self.action = self._read_normalizer("unnormalizer_processor", "ACTION", ACTION, ACTION_SIZE)
        prompt = self._settings("tokenizer_processor")
        self.backbone = self.config.vlm_model_name or prompt.tokenizer_name

    def _settings(self, step: str) -> _StepConfig:
        return self._steps.get(step, _Step()).config or _StepConfig()

    def _check_implemented(self) -> None:
        found = {name: getattr(self.config, name) for name in _IMPLEMENTED}
        found["normalization of images"] = self._mode("normalizer_processor", "VISUAL")
        for name, expected in {**_IMPLEMENTED, "normalization of images": "IDENTITY"}.items():
            if (found[name] or False) != expected:
                raise WeightsError(
                    f"Checkpoint {self.folder} has {name} {found[name]!r}: only {expected!r} is "
                    "implemented."
                )

    def _mode(self, step: str, kind: str) -> str:
        """Return how values of a kind are normalised."""
        norm_map = self._settings(step).norm_map or self.config.normalization_mapping or {}
        return norm_map.get(kind, "IDENTITY")

    def _check_size(self, features: dict[str, Feature] | None, name: str, size: int) -> None:
        feature = (features or {}).get(name)
        if feature is not None and feature.shape != [size]:
            raise WeightsError(
                f"Checkpoint {self.folder}: expected {name!r} of shape [{size}], as LIBERO has it, "
                f"got {feature.shape} in config.json: it was trained for another robot."
            )

    def _read_cameras(self) -> tuple[tuple[str, ...], int]:
        renamed = self._settings("rename_observations_processor").rename_map or {}
        original = {new: old for old, new in renamed.items()}
        views: list[str] = []
        size = 256
        for name, feature in (self.config.input_features or {}).items():
            if feature.type != "VISUAL":
                continue
            short = original.get(name, name).removeprefix(IMAGES)
            # Cameras that are not there are masked in the original: leaving them out is the same.
            if short.startswith("empty_camera"):
                continue
            if short not in _VIEWS:
                raise WeightsError(
                    f"Checkpoint {self.folder}: unknown camera {name!r}; known: "
                    f"{', '.join(IMAGES + view for view in _VIEWS)}. Say which one it is in "
                    "policy_preprocessor.json: step rename_observations_processor, rename_map, "
                    f'{{"{IMAGES}image": "{name}"}} (image2 for the wrist).'
                )
            view = _VIEWS[short]
            if view is None:
                continue
            if view in views:
                raise WeightsError(
                    f"Checkpoint {self.folder}: two of its cameras are LIBERO's {view!r} camera."
                )
            views.append(view)
            # (3, H, W) or (H, W, 3). A base model's features have the network's size instead of
            # the data set's, which is 256 then.
            if name not in original and not short.endswith("_rgb"):
                size = max(feature.shape)
        if not views:
            raise WeightsError(
                f"Checkpoint {self.folder}: no camera among input_features of config.json."
            )
        return tuple(views), size

    def _read_normalizer(self, step: str, kind: str, name: str, size: int) -> Normalizer:
        mode = self._mode(step, kind)
        if mode == "IDENTITY":
            one = {"mean": [0.0] * size, "std": [1.0] * size, "mask": [False] * size}
            return Normalizer(one, "mean_std")
        if mode not in _MODES:
            raise WeightsError(
                f"Checkpoint {self.folder}: unknown normalisation {mode!r} of {name!r}; known: "
                f"IDENTITY, {', '.join(_MODES)}."
            )
        ours = _MODES[mode]
        statistics = {
            statistic: self._statistic(step, name, statistic) for statistic in MODES[ours]
        }
        for statistic, value in statistics.items():
            if tuple(value.shape) != (size,) or not torch.isfinite(value).all():
                raise WeightsError(
                    f"Checkpoint {self.folder}: expected {name}.{statistic} as {size} finite "
                    f"numbers, got shape {tuple(value.shape)}, or some that are not finite."
                )
        epsilon = float(self._settings(step).eps or 1e-8)
        return Normalizer(statistics, ours, epsilon=epsilon)

    def _statistic(self, step: str, name: str, statistic: str) -> torch.Tensor:
        buffer = name.replace(".", "_")
        group = "normalize_inputs" if name == STATE else "unnormalize_outputs"
        file = self._steps.get(step, _Step()).state_file
        places = [(file, f"{name}.{statistic}")] if file else []
        places.append((WEIGHTS, f"{group}.buffer_{buffer}.{statistic}"))
        for place, key in places:
            # The name comes from a file: nothing outside of the folder is opened.
            path = self.folder / Path(place).name
            if path.is_file() and key in (tensors := Checkpoint(path)).shapes:
                return tensors.tensor(key).float()
        looked = " and ".join(f"{key!r} in {place}" for place, key in places)
        raise WeightsError(
            f"Checkpoint {self.folder} lacks statistics of {name!r}: looked for {looked}. Base "
            "models have none; take a checkpoint that was fine-tuned on LIBERO, or copy the "
            "statistics of its data set."
        )
