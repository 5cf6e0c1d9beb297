"""What SmolVLA and pi0 share: preparation of a batch, noise, and actions in the env's units.

A flow-matching policy turns noise into a chunk of actions in a few denoising steps. Its hidden
states are the input of ``action_out_proj`` at the last step, where the actions are almost clean
(time 0.1 with ten steps). They depend on the noise, so the noise must not depend on chance, on the
other rows of the batch or on how often the policy was called. Three ways to have that:

- ``"fixed"``, the default: one draw for the seed, the same for every row and call; a typical point
  of the distribution that the policy was trained on.
- ``"zeros"``: the middle of that distribution, which no training sample was ever that close to.
- ``"observation"``: a draw for the seed and the row's own images, instruction and proprioception,
  so that rows and steps have noise as different as in the original.

An actor that acts through the noise passes its own to :meth:`FlowBackend.infer`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from vla_gym.errors import ConfigError
from vla_gym.vla.base import ACTION_SIZE, CAMERAS, PROPRIO_SIZE, VLAOutput
from vla_gym.vla.lerobot_files import LeRobotPolicyFiles

NOISES = ("fixed", "zeros", "observation")


class FlowOutput(NamedTuple):
    """Result of all denoising steps.

    Attributes:
        hidden: (B, C, H) float32: input of ``action_out_proj`` at the last step.
        actions: (B, C, max_action_dim) float32, normalised and padded.
    """

    hidden: torch.Tensor
    actions: torch.Tensor


@dataclass(frozen=True)
class FlowOptions:
    """A caller's choices.

    Attributes:
        noise: ``"fixed"``, ``"zeros"`` or ``"observation"``, see the module.
        seed: Of the noise.
        num_steps: Denoising steps; None for the checkpoint's.
        image_size: Side in pixels of the renders; None for that of the training data.
    """

    noise: str = "fixed"
    seed: int = 0
    num_steps: int | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: If one is out of range.
        """
        if self.noise not in NOISES:
            raise ConfigError(f"Expected noise in {NOISES}, got {self.noise!r}.")
        if self.num_steps is not None and self.num_steps < 1:
            raise ConfigError(f"Expected num_steps >= 1, got {self.num_steps}.")
        if self.image_size is not None and self.image_size < 1:
            raise ConfigError(f"Expected image_size >= 1, got {self.image_size}.")


def resize_with_padding(
    images: torch.Tensor, height: int, width: int, *, centred: bool
) -> torch.Tensor:
    """Resize images without changing their proportions and fill up with black.

    Args:
        images: (N, 3, H, W) float32 in [0, 1].
        height: Of the result.
        width: Of the result.
        centred: Whether the image is in the middle (pi0) or at the right and bottom (SmolVLA).

    Returns:
        (N, 3, height, width), bilinear without anti-aliasing.
    """
    old_height, old_width = images.shape[-2:]
    if (old_height, old_width) == (height, width):
        return images
    ratio = max(old_width / width, old_height / height)
    size = (int(old_height / ratio), int(old_width / ratio))
    images = F.interpolate(images, size, mode="bilinear", align_corners=False)
    above, left = height - size[0], width - size[1]
    if centred:
        above, left = above // 2, left // 2
    padding = (left, width - size[1] - left, above, height - size[0] - above)
    return F.pad(images, padding) if any(padding) else images


class FlowBackend(ABC):
    """:class:`~vla_gym.vla.base.FrozenVLA` over a flow-matching network; base of two backends.

    Attributes:
        model: The network, frozen.
        files: What the checkpoint's folder says.
        options: The caller's choices.
        num_steps: Denoising steps.
    """

    #: Whether images that are not square are centred.
    centred_padding: bool

    def __init__(
        self,
        model: nn.Module,
        files: LeRobotPolicyFiles,
        tokenizer: Any,
        options: FlowOptions,
        *,
        hidden_size: int,
        pixel_size: tuple[int, int],
        num_steps: int,
        pad_prompts: bool = False,
    ) -> None:
        """Freeze a network.

        Args:
            model: On its device.
            files: Of the checkpoint.
            tokenizer: Of the prompt, called as transformers' tokenizers are.
            options: See the class.
            hidden_size: Size H of the hidden states.
            pixel_size: Height and width in pixels that the network works on.
            num_steps: Denoising steps of the checkpoint.
            pad_prompts: Pad to the longest prompt that the checkpoint allows, not to the longest
                of the batch, so that shapes do not change between calls.
        """
        self.model = model.eval().requires_grad_(False)
        self.files, self.tokenizer, self.options = files, tokenizer, options
        self.pixel_size, self.pad_prompts = pixel_size, pad_prompts
        config = files.config
        self.name = files.folder.name
        self.horizon = self.num_hidden_tokens = int(config.get("chunk_size", 50))
        self.hidden_size = hidden_size
        self.image_size = options.image_size or files.image_size
        self.num_steps = options.num_steps or num_steps
        self._max_prompt = int(config.get("tokenizer_max_length", 48))
        self._state_dim = int(config.get("max_state_dim", 32))
        self.noise_shape = (self.horizon, int(config.get("max_action_dim", 32)))
        self._fixed_noise = self._draw(options.seed)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    @abstractmethod
    def sample(
        self,
        pixels: torch.Tensor,
        image_mask: torch.Tensor,
        tokens: torch.Tensor,
        token_mask: torch.Tensor,
        state: torch.Tensor,
        noise: torch.Tensor,
    ) -> FlowOutput:
        """Run the network and all denoising steps.

        Args:
            pixels: (B, V, 3, height, width) float32 in [-1, 1].
            image_mask: (B, V) bool, False for a camera that is not there.
            tokens: (B, T) int64, padded on the right.
            token_mask: (B, T) bool.
            state: (B, max_state_dim) float32, normalised and padded.
            noise: (B, C, max_action_dim) float32.
        """

    @torch.no_grad()
    def infer(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        noise: torch.Tensor | None = None,
    ) -> VLAOutput:
        """Predict one chunk per row; see :class:`~vla_gym.vla.base.FrozenVLA`.

        Args:
            images: As there.
            instructions: As there.
            proprio: As there.
            noise: (B, C, max_action_dim) float32 to start from; None as the options say.

        Raises:
            ConfigError: If shapes, dtypes or batch sizes do not fit.
        """
        stacked = self._stack(images)
        count = len(stacked)
        proprio = np.asarray(proprio, dtype=np.float32)
        if proprio.ndim != 2 or proprio.shape[1] != PROPRIO_SIZE:
            raise ConfigError(f"Expected proprio of shape (B, 8), got {proprio.shape}.")
        if not count == len(instructions) == len(proprio):
            raise ConfigError(
                "Expected one instruction and one proprio row per image, got "
                f"{count} images, {len(instructions)} instructions, {len(proprio)} rows."
            )
        if noise is None:
            noise = self._noise(stacked, instructions, proprio)
        elif tuple(noise.shape) != (count, *self.noise_shape):
            raise ConfigError(
                f"Expected noise of shape {(count, *self.noise_shape)}, got {tuple(noise.shape)}."
            )
        device = self.device
        state = self.files.state.normalize(torch.from_numpy(proprio).to(device))
        state = F.pad(state, (0, self._state_dim - PROPRIO_SIZE))
        tokens, token_mask = self.tokenize(instructions)
        out = self.sample(
            self.to_pixels(stacked),
            torch.ones(stacked.shape[:2], dtype=torch.bool, device=device),
            tokens.to(device),
            token_mask.to(device),
            state,
            noise.to(device=device, dtype=torch.float32),
        )
        actions = self.files.action.unnormalize(out.actions[..., :ACTION_SIZE])
        # Robosuite's controller clips as well: nothing is lost.
        return VLAOutput(out.hidden, actions.clamp(-1.0, 1.0))

    def tokenize(self, instructions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids (B, T) int64 and mask (B, T) bool of the prompts, padded on the right."""
        prompts = [text if text.endswith("\n") else f"{text}\n" for text in instructions]
        encoded = self.tokenizer(
            prompts,
            max_length=self._max_prompt,
            truncation=True,
            padding="max_length" if self.pad_prompts else "longest",
            padding_side="right",
            return_tensors="pt",
        )
        return encoded["input_ids"], encoded["attention_mask"].bool()

    def to_pixels(self, stacked: np.ndarray) -> torch.Tensor:
        """Turn renders (B, V, S, S, 3) uint8, upright, into (B, V, 3, height, width) in [-1, 1].

        LIBERO's data sets show the raw, upside-down renders turned by 180 degrees: upright, with
        left and right exchanged. Bytes go to the device, the rest is done there.
        """
        # The copy makes the strides positive, which torch needs.
        mirrored = torch.from_numpy(np.ascontiguousarray(stacked[:, :, :, ::-1])).to(self.device)
        pixels = mirrored.flatten(0, 1).permute(0, 3, 1, 2).float() / 255.0
        pixels = resize_with_padding(pixels, *self.pixel_size, centred=self.centred_padding)
        return (pixels * 2.0 - 1.0).unflatten(0, stacked.shape[:2])

    def _stack(self, images: dict[str, np.ndarray]) -> np.ndarray:
        """Return the images of the network's cameras as (B, V, S, S, 3) uint8."""
        missing = [view for view in self.files.views if view not in images]
        if missing:
            raise ConfigError(f"Expected images of the cameras {CAMERAS}, got {sorted(images)}.")
        size = self.image_size
        for view in self.files.views:
            found = np.asarray(images[view])
            if found.dtype != np.uint8 or found.ndim != 4 or found.shape[1:] != (size, size, 3):
                raise ConfigError(
                    f"Expected {view!r} as (B, {size}, {size}, 3) uint8, got {found.dtype} "
                    f"{found.shape}: render with image_size={size}, or load the VLA with another "
                    "image_size."
                )
        if len({len(images[view]) for view in self.files.views}) > 1:
            raise ConfigError("Expected as many images of one camera as of the other.")
        return np.stack([images[view] for view in self.files.views], axis=1)

    def _draw(self, seed: int) -> torch.Tensor:
        # On the CPU whatever the device, so that a seed gives the same noise everywhere.
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.noise_shape, generator=generator)

    def _noise(
        self, stacked: np.ndarray, instructions: list[str], proprio: np.ndarray
    ) -> torch.Tensor:
        """Return noise (B, C, max_action_dim) as the options say; row i depends on row i alone."""
        count = len(stacked)
        if self.options.noise == "zeros":
            return torch.zeros(count, *self.noise_shape)
        if self.options.noise == "fixed":
            return self._fixed_noise.expand(count, -1, -1)
        rows = []
        for image, text, state in zip(stacked, instructions, proprio, strict=True):
            digest = hashlib.blake2b(f"{self.options.seed}\n{text}\n".encode(), digest_size=8)
            digest.update(np.ascontiguousarray(state).tobytes())
            digest.update(np.ascontiguousarray(image).tobytes())
            # One bit less than 64: manual_seed takes signed numbers.
            rows.append(self._draw(int.from_bytes(digest.digest(), "little") >> 1))
        return torch.stack(rows)
