"""What the backends of OpenVLA and OpenVLA-OFT have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vla_gym.errors import ConfigError
from vla_gym.vla.base import CAMERAS
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.llama_layers import run_layers
from vla_gym.vla.openvla_config import OpenVLAConfig
from vla_gym.vla.openvla_heads import ACTION_SIZE
from vla_gym.vla.openvla_images import RENDER_SIZE, normalize_pixels, preprocess
from vla_gym.vla.openvla_model import OpenVLAModel
from vla_gym.vla.openvla_sequence import Prompts, Tokenizer, load_tokenizer
from vla_gym.vla.statistics import Normalizer, choose_statistics, read_statistics
from vla_gym.vla.tokens import actions_to_bins, bins_to_actions

GRIPPER = 6  # index of the gripper in an action
#: Of ``torch.compile``; the last two record CUDA graphs, one for each shape.
COMPILE_MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune")


@dataclass(frozen=True)
class Loaded:
    """A checkpoint's parts that both backends need.

    Attributes:
        folder: Where it is.
        model: The network.
        prompts: From instructions to ids.
        unnorm_key: Data set whose statistics are used.
        statistics: Of that data set.
    """

    folder: Path
    model: OpenVLAModel
    prompts: Prompts
    unnorm_key: str
    statistics: dict[str, Any]


def load_parts(
    folder: Path,
    device: str,
    dtype: torch.dtype | None,
    unnorm_key: str | None,
    tokenizer: str | Path | Tokenizer | None,
) -> Loaded:
    """Load network, tokenizer and statistics of a checkpoint folder.

    Raises:
        ConfigError: If the data set is unknown, or must be chosen.
        WeightsError: If a file is missing, damaged or does not fit.
        NotEnoughMemoryError: If the device has too little.
    """
    # What is small comes first: loading the network may take minutes.
    key, statistics = choose_statistics(read_statistics(folder), unnorm_key, folder)
    if not callable(tokenizer):
        tokenizer = load_tokenizer(folder if tokenizer is None else tokenizer)
    checkpoint = Checkpoint(folder)
    config = OpenVLAConfig.from_checkpoint(folder, checkpoint.shapes)
    model = OpenVLAModel.from_checkpoint(checkpoint, config, device, default_dtype(device, dtype))
    return Loaded(folder, model, Prompts(tokenizer, config.text.vocab_size), key, statistics)


def default_dtype(device: str, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that was asked for, else bfloat16 on a GPU and float32 on a CPU."""
    if dtype is not None:
        return dtype
    return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32


def _compiled(function: Callable[..., torch.Tensor], mode: str) -> Callable[..., torch.Tensor]:
    compiled = torch.compile(function, mode=mode)
    if mode not in ("reduce-overhead", "max-autotune"):
        return compiled

    def run(*arguments: Any, **keywords: Any) -> torch.Tensor:
        # A graph writes its result into the same memory every time; callers keep theirs.
        return compiled(*arguments, **keywords).clone()

    return run


class OpenVLABase:
    """Images, prompts and actions; the subclasses decode.

    Attributes:
        model: The network.
        name: Name of the checkpoint's folder.
        horizon: Actions in a chunk.
        num_hidden_tokens: Hidden states, one for each number of a chunk.
        hidden_size: Of a hidden state.
        image_size: Renders that are expected, in pixels.
        num_views: 1 (agentview) or 2 (and wrist).
        normalizer: Of actions.
    """

    image_size = RENDER_SIZE

    def __init__(
        self,
        parts: Loaded,
        *,
        horizon: int,
        num_views: int,
        epsilon: float,
        compile: bool,
        compile_mode: str = "default",
        jpeg: bool,
        crop: bool,
    ) -> None:
        """Take a checkpoint's parts; see the subclasses for the rest.

        Args:
            parts: What :func:`load_parts` returned.
            horizon: Actions in a chunk.
            num_views: 1 or 2.
            epsilon: Added to the actions' range.
            compile: Whether to compile the parts that take time.
            compile_mode: One of :data:`COMPILE_MODES`.
            jpeg: See :func:`vla_gym.vla.openvla_images.preprocess`.
            crop: As ``jpeg``.

        Raises:
            ConfigError: If the number of views or the mode is another.
        """
        if num_views not in (1, 2):
            raise ConfigError(f"Expected num_views 1 or 2, got {num_views}.")
        if compile_mode not in COMPILE_MODES:
            raise ConfigError(
                f"Expected compile_mode {', '.join(COMPILE_MODES)}, got {compile_mode!r}."
            )
        self.model, self.prompts = parts.model, parts.prompts
        self.name = parts.folder.name
        self.unnorm_key = parts.unnorm_key
        self.horizon = horizon
        self.num_hidden_tokens = horizon * ACTION_SIZE
        self.hidden_size = int(parts.model.config.text.hidden_size)
        self.num_views = num_views
        self.normalizer = Normalizer(parts.statistics.get("action", {}), epsilon=epsilon)
        self._jpeg, self._crop = jpeg, crop
        self._run_layers: Callable[..., torch.Tensor] = run_layers
        self._embed_pixels: Callable[..., torch.Tensor] = self.model.embed_pixels
        if compile:
            self._run_layers = _compiled(run_layers, compile_mode)
            self._embed_pixels = _compiled(self.model.embed_pixels, compile_mode)

    def pixels(self, images: dict[str, np.ndarray], instructions: Sequence[str]) -> torch.Tensor:
        """Return what the vision towers see, before normalisation.

        Args:
            images: As in ``infer``.
            instructions: B of them.

        Returns:
            (B * V, side, side, 3) uint8 on the model's device.

        Raises:
            ConfigError: If a camera is missing, or dtypes, shapes or batch sizes do not fit.
        """
        cameras = CAMERAS[: self.num_views]
        if any(camera not in images for camera in cameras):
            raise ConfigError(f"Expected images of {cameras}, got {tuple(images)}.")
        views = [np.asarray(images[camera]) for camera in cameras]
        if {len(view) for view in views} != {len(instructions)} or not instructions:
            raise ConfigError(
                f"Expected one image of {' and '.join(cameras)} for each instruction, got "
                f"{len(instructions)} instructions and {[len(view) for view in views]} images."
            )
        side = self.model.config.image_size
        return preprocess(views, side, self.model.device, jpeg=self._jpeg, crop=self._crop)

    def embed_images(self, images: torch.Tensor, batch: int) -> torch.Tensor:
        """Map what :meth:`pixels` returned to patch embeddings (batch, V * patches, H)."""
        # Not compiled: its constants come from the CPU, which no CUDA graph may hold.
        pixels = normalize_pixels(images, self.model.dtype)
        return self._embed_pixels(pixels.reshape(batch, -1, *pixels.shape[-2:]))

    def to_env(self, normalized: torch.Tensor) -> torch.Tensor:
        """Turn normalised actions (..., 7) into the environment's, float32 in [-1, 1].

        The policy's gripper is 0 (closed) to 1 (open); the environment's -1 opens and +1 closes.
        """
        actions = self.normalizer.unnormalize(normalized.float())
        gripper = -torch.sign(2.0 * actions[..., GRIPPER:] - 1.0)
        return torch.cat([actions[..., :GRIPPER].clamp(-1.0, 1.0), gripper], dim=-1)

    def tokens_to_actions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (..., C, 7) float32 of tokens (..., C, 7)."""
        return self.to_env(bins_to_actions(tokens))

    def actions_to_tokens(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the nearest tokens (..., C, 7) int64 of the environment's actions (..., C, 7)."""
        policy = torch.cat([actions[..., :GRIPPER], (1.0 - actions[..., GRIPPER:]) / 2.0], dim=-1)
        return actions_to_bins(self.normalizer.normalize(policy.double()))
