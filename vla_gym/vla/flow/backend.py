"""What SmolVLA, pi0 and pi0.5 share: preparation of a batch, noise, and actions in the env's units.

A flow-matching policy turns noise into a chunk of actions in a few denoising steps. Its hidden
states are the input of ``action_out_proj`` at the last step, where the actions are almost clean
(time 0.1 with ten steps). They depend on the noise, so the noise must not depend on chance, on the
other rows of the batch or on how often the policy was called; :class:`FlowOptions` names three
ways to have that. An actor that acts through the noise passes its own to :meth:`FlowBackend.infer`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vla_gym.errors import ConfigError
from vla_gym.outside import ChunkLength, Count, ImageSide
from vla_gym.vla.base import ACTION_SIZE, PROPRIO_SIZE, FlowOutput, FrozenVLA, VLAOutput
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.files import find_base_model, load_tokenizer
from vla_gym.vla.flow.functions import resize_with_padding
from vla_gym.vla.flow.lerobot_files import LeRobotPolicyFiles
from vla_gym.vla.load_weights import load_into
from vla_gym.vla.preprocess import check_images, check_rows
from vla_gym.vla.spec_options import make_options

Velocity = Callable[[torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class FlowOptions:
    """Options of all three backends.

    Attributes:
        vlm: Folder with tokenizer and, for SmolVLA, config.json of the VLM that the policy was
            made from; None looks into the checkpoint's subfolder ``vlm``, of pi0 and pi0.5
            into the checkpoint too, and into huggingface_hub's cache.
        noise: ``"fixed"``: one draw for the seed, the same for every row and call, a typical point
            of the distribution that the policy was trained on. ``"zeros"``: the middle of that
            distribution, which no training sample was ever that close to. ``"observation"``: a
            draw for the seed and the row's own images, instruction and proprioception, so that
            rows and steps have noise as different as in the original.
        seed: Of the noise.
        num_steps: Denoising steps; None for the checkpoint's.
        image_size: Side in pixels of the renders; None for that of the training data.
    """

    vlm: str | Path | None = None
    noise: Literal["fixed", "zeros", "observation"] = "fixed"
    seed: Count = 0
    num_steps: ChunkLength | None = None
    image_size: ImageSide | None = None


class FlowInputs(NamedTuple):
    """A prepared batch of observations.

    Attributes:
        pixels: (B, V, 3, height, width) float32 in [-1, 1].
        tokens: (B, T) int64, padded on the right.
        token_mask: (B, T) bool.
        state: (B, max_state_dim) float32, normalised and padded.
    """

    pixels: torch.Tensor
    tokens: torch.Tensor
    token_mask: torch.Tensor
    state: torch.Tensor


class FlowBackend(FrozenVLA, ABC):
    """:class:`~vla_gym.vla.base.FrozenVLA` over a flow-matching network; base of three backends.

    Attributes:
        model: The network, frozen.
        files: What the checkpoint's folder says.
        options: The caller's choices.
        num_steps: Denoising steps.
        pixel_size: Height and width in pixels that the network works on.
    """

    heads = ("flow",)
    head = "flow"
    #: Of the backend's own.
    Options: ClassVar[type[FlowOptions]] = FlowOptions
    pixel_size: tuple[int, int]
    #: Whether images that are not square are centred.
    centred_padding: bool
    #: ``type`` in config.json.
    policy_type: str
    #: Name of the number of denoising steps in config.json.
    steps_key: str
    #: Longest prompt in tokens, where config.json has none.
    max_prompt = 48
    #: Name on the hub of the VLM, where the checkpoint names none.
    default_backbone: str | None = None
    #: Files that are needed of the VLM.
    backbone_files: tuple[str, ...]
    #: Beginnings of the network's names of what is float32 always.
    float32_parts: tuple[str, ...]

    def __init__(
        self,
        model: Any,
        files: LeRobotPolicyFiles,
        tokenizer: Any,
        options: FlowOptions,
        compile: bool,
    ) -> None:
        """Freeze a network; :meth:`from_pretrained` is the usual way to get here."""
        self.model = model.eval().requires_grad_(False)
        self.files, self.tokenizer, self.options = files, tokenizer, options
        self._pad_prompts = compile
        config = files.config
        self.name, self.cameras = files.folder.name, files.views
        self.horizon = self.num_hidden_tokens = config.chunk_size
        self.image_size = options.image_size or files.image_size
        self.num_steps = options.num_steps or getattr(config, self.steps_key)
        self.hidden_size = int(model.action_out_proj.in_features)
        self.noise_shape = (self.horizon, config.max_action_dim)
        self.set_up(compile)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        compile: bool = False,
        **options: Any,
    ) -> Self:
        """Load a policy that lerobot saved; see :func:`vla_gym.vla.load` and ``Options``.

        ``dtype`` is of VLM and expert, None for bfloat16 on a GPU and float32 elsewhere; the
        projections of state, actions and time are float32 always. With ``compile``, prompts are
        padded to the longest that the checkpoint allows, so that the network is compiled once for
        each batch size.
        """
        chosen = make_options(cls.Options, options)
        files = LeRobotPolicyFiles(Path(folder), cls.policy_type)
        folders = [files.folder / "vlm"]
        if "config.json" not in cls.backbone_files:  # the one in the checkpoint is the policy's
            folders.append(files.folder)
        backbone = find_base_model(
            files.folder,
            files.backbone or cls.default_backbone,
            cls.backbone_files,
            option="vlm",
            given=chosen.vlm,
            folders=folders,
        )
        tokenizer = load_tokenizer(backbone)
        checkpoint = Checkpoint(files.folder)
        model, rename = cls.make_network(files, backbone, checkpoint)
        load_into(
            model,
            checkpoint,
            device=device,
            dtype=dtype,
            rename=rename,
            keep_float32=cls.float32_parts,
        )
        model.to(device)  # the buffers
        return cls(model, files, tokenizer, chosen, compile)

    @staticmethod
    @abstractmethod
    def make_network(
        files: LeRobotPolicyFiles, backbone: Path, checkpoint: Checkpoint
    ) -> tuple[Any, Callable[[str], str | None]]:
        """Return the network, its parameters on the meta device, and what maps names to its own.

        Args:
            files: Of the checkpoint.
            backbone: Folder with the VLM's files.
            checkpoint: Whose names are mapped; to None where they are never used.

        Raises:
            WeightsError: If config.json says something that is not implemented.
        """

    @abstractmethod
    def set_up(self, compile: bool) -> None:
        """Set ``pixel_size``, and compile the network if asked."""

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.model.parameters()).device

    @abstractmethod
    def flow(self, inputs: FlowInputs) -> Velocity:
        """Run the VLM once; return what runs the expert, with gradients where there are any.

        Returns:
            The velocity of ``FlowOutput``; hidden states are the inputs (B, C, H) float32 of
            ``action_out_proj``, actions are normalised and padded.
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

        ``noise`` (B, C, max_action_dim) float32 is what to start from; None as the options say.
        """
        flow = self.flow_outputs(images, instructions, proprio)
        if noise is not None:
            wanted, found = tuple(flow.start.shape), tuple(noise.shape)
            if found != wanted:
                raise ConfigError(f"Expected noise of shape {wanted}, got {found}.")
            flow = flow._replace(start=noise.to(flow.start))
        hidden, chunk = flow.integrate(self.num_steps)
        return VLAOutput(hidden, self.flow_to_env(chunk))

    def flow_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> FlowOutput:
        """Run the VLM; see :class:`~vla_gym.vla.base.TrainableFlowVLA`."""
        stacked = np.stack(check_images(images, self.cameras, self.image_size), axis=1)
        proprio = np.asarray(proprio, dtype=np.float32)
        if proprio.ndim != 2 or proprio.shape[1] != PROPRIO_SIZE:
            raise ConfigError(f"Expected proprio of shape (B, 8), got {proprio.shape}.")
        check_rows(len(stacked), instructions, proprio)
        state = self.files.state.normalize(torch.from_numpy(proprio).to(self.device))
        state = F.pad(state, (0, self.files.config.max_state_dim - PROPRIO_SIZE))
        prompts = self.tokenize(self.prompts(instructions, proprio))
        velocity = self.flow(FlowInputs(self.to_pixels(stacked), *prompts, state))
        if getattr(self.model, "checkpointed", False) and torch.is_grad_enabled():
            # It leaves the keys that it adds to as they were: a second pass sees the same.
            velocity = partial(checkpoint, velocity, use_reentrant=False)
        return FlowOutput(velocity, self._noise(stacked, instructions, proprio).to(self.device))

    def flow_to_env(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (B, C, 7) of normalised, padded ones (B, C, A)."""
        actions: torch.Tensor = self.files.action.unnormalize(chunk[..., :ACTION_SIZE])
        # Robosuite's controller clips as well: nothing is lost.
        return actions.clamp(-1.0, 1.0)

    def prompts(self, instructions: list[str], proprio: np.ndarray) -> list[str]:  # noqa: ARG002
        """Return what the VLM reads: B texts; ``proprio`` is (B, 8) float32 as it came."""
        return [text if text.endswith("\n") else f"{text}\n" for text in instructions]

    def tokenize(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids (B, T) int64 and mask (B, T) bool of the prompts, padded on the right."""
        encoded = self.tokenizer(
            prompts,
            max_length=self.files.config.tokenizer_max_length or self.max_prompt,
            truncation=True,
            padding="max_length" if self._pad_prompts else "longest",
            padding_side="right",
            return_tensors="pt",
        ).to(self.device)
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

    def _noise(
        self, stacked: np.ndarray, instructions: list[str], proprio: np.ndarray
    ) -> torch.Tensor:
        """Return noise (B, C, max_action_dim) as the options say; row i depends on row i alone."""
        if self.options.noise == "zeros":
            return torch.zeros(len(stacked), *self.noise_shape)
        seeds = [self.options.seed] * len(stacked)
        if self.options.noise == "observation":
            for row, text in enumerate(instructions):
                digest = hashlib.blake2b(f"{seeds[row]}\n{text}\n".encode(), digest_size=8)
                digest.update(proprio[row].tobytes() + stacked[row].tobytes())
                # One bit less than 64: manual_seed takes signed numbers.
                seeds[row] = int.from_bytes(digest.digest(), "little") >> 1
        # On the CPU whatever the device, so that a seed gives the same noise everywhere.
        generator = torch.Generator()
        draws = [torch.randn(self.noise_shape, generator=generator.manual_seed(s)) for s in seeds]
        return torch.stack(draws)
