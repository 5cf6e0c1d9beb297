"""What the backends of OpenVLA and OpenVLA-OFT have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
import torch
from torch import nn

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.vla.base import ACTION_SIZE, CAMERAS, GRIPPER, PROPRIO_SIZE, FrozenVLA
from vla_gym.vla.checkpoint_files import Checkpoint, find_file
from vla_gym.vla.load_weights import load_into
from vla_gym.vla.openvla.config import OpenVLAConfig
from vla_gym.vla.openvla.images import RENDER_SIZE, normalize_pixels, preprocess
from vla_gym.vla.openvla.model import L1ActionHead, OpenVLAModel, proprio_projector
from vla_gym.vla.openvla.sequence import Prompts, Tokenizer, load_tokenizer
from vla_gym.vla.preprocess import check_images
from vla_gym.vla.spec_options import make_options
from vla_gym.vla.statistics import Normalizer, choose_statistics, read_statistics
from vla_gym.vla.tokens import actions_to_bins, bins_to_actions

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass(frozen=True)
class OpenVLAOptions:
    """Options of both backends.

    Attributes:
        unnorm_key: Data set, if the statistics are of several; ``libero_goal`` stands for
            ``libero_goal_no_noops`` too.
        tokenizer: File or folder of another tokenizer.json, or a function from text to ids.
        jpeg: Whether images are compressed as the training data was.
        crop: Whether images are cropped, as is right for training on random crops.
        compile_mode: With ``compile``: the mode of :func:`torch.compile`, e.g. ``reduce-overhead``,
            which replays CUDA graphs; None: its default.
    """

    unnorm_key: str | None = None
    tokenizer: str | Path | Tokenizer | None = None
    jpeg: bool = True
    crop: bool = True
    compile_mode: CompileMode | None = None


class Parts(NamedTuple):
    """A checkpoint's parts: name of its folder, network, prompts, statistics of the data set.

    ``action_head`` and ``proprio_projector`` are OpenVLA-OFT's; None where the policy has none.
    """

    name: str
    model: OpenVLAModel
    prompts: Prompts
    statistics: Mapping[str, Any]
    action_head: L1ActionHead | None = None
    proprio_projector: nn.Module | None = None


class OpenVLABase(FrozenVLA):
    """Images, prompts and actions; the subclasses decode.

    Attributes:
        model: The network.
        normalizer: Of actions.
    """

    Options: ClassVar[type[OpenVLAOptions]] = OpenVLAOptions
    #: Added to the range of what is normalised.
    epsilon: ClassVar[float]
    image_size = RENDER_SIZE

    def __init__(
        self, parts: Parts, options: OpenVLAOptions, *, horizon: int, num_views: int, compile: bool
    ) -> None:
        """Take a checkpoint's parts; :meth:`from_pretrained` is the usual way to get here."""
        self.model, self.prompts, self.name = parts.model, parts.prompts, parts.name
        self.options, self.horizon = options, horizon
        self.cameras = CAMERAS[:num_views]
        self.num_hidden_tokens = horizon * ACTION_SIZE
        self.hidden_size = int(parts.model.config.text.hidden_size)
        self.normalizer = Normalizer(parts.statistics.get("action") or {}, epsilon=self.epsilon)
        self._is_compiled = compile
        # Takes the network as an argument: a deep copy of this object then runs its own.
        self._embed_pixels: Callable[..., torch.Tensor] = OpenVLAModel.embed_pixels
        if compile:
            self._embed_pixels = torch.compile(self._embed_pixels, mode=options.compile_mode)

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
        """Load a checkpoint folder; see :func:`vla_gym.vla.load` and the backend's ``Options``.

        ``folder`` has config.json, the weights, tokenizer.json, dataset_statistics.json and, if the
        policy has them, ``action_head--*_checkpoint.pt`` and
        ``proprio_projector--*_checkpoint.pt``. ``dtype`` None is bfloat16 on a GPU, float32 on a
        CPU. ``compile`` is of the vision towers and, for OpenVLA-OFT, the Llama.
        """
        chosen, folder = make_options(cls.Options, options), Path(folder)
        if not folder.is_dir():
            raise WeightsError(f"Expected the folder of an OpenVLA checkpoint, got {folder}.")
        # What is small comes first: loading the network may take minutes.
        files = [
            find_file(folder, part, "checkpoint") for part in ("action_head", "proprio_projector")
        ]
        if film := find_file(folder, "vision_backbone", "checkpoint"):
            raise WeightsError(f"{film} is of a policy with FiLM, which is not supported.")
        statistics: Mapping[str, Any] = choose_statistics(
            read_statistics(folder), chosen.unnorm_key, folder
        )
        sizes = {"action": ACTION_SIZE} | ({"proprio": PROPRIO_SIZE} if files[1] else {})
        for name, size in sizes.items():
            if (found := Normalizer(statistics.get(name) or {}).size) != size:
                raise WeightsError(
                    f"{folder}: expected statistics of {size} numbers of {name}, got {found}."
                )
        tokenizer = chosen.tokenizer or folder
        if not callable(tokenizer):
            tokenizer = load_tokenizer(tokenizer)
        config = OpenVLAConfig.from_checkpoint(folder)
        model = OpenVLAModel.from_checkpoint(Checkpoint(folder), config, device, dtype)
        width = config.text.hidden_size
        with torch.device("meta"):
            action_head = L1ActionHead(width) if files[0] else None
            projector = proprio_projector(width) if files[1] else None
        for head, file in zip((action_head, projector), files, strict=True):
            if head is not None and file is not None:
                load_into(head, Checkpoint(file), device=device, dtype=model.dtype)
                head.eval()
        prompts = Prompts(tokenizer, config.text.vocab_size)
        parts = Parts(folder.name, model, prompts, statistics, action_head, projector)
        backend: Any = cls  # the subclasses take horizon and views from elsewhere
        made: Self = backend(parts, chosen, compile)
        return made

    def pixels(self, images: dict[str, np.ndarray], instructions: Sequence[str]) -> torch.Tensor:
        """Return what the vision towers see, before normalisation.

        Returns:
            (B * V, side, side, 3) uint8 on the model's device.

        Raises:
            ConfigError: If a camera is missing, or dtypes, shapes or batch sizes do not fit.
        """
        views = check_images(images, self.cameras, self.image_size)
        if len(views[0]) != len(instructions) or not instructions:
            raise ConfigError(
                f"Expected one image of each camera for each instruction, got {len(views[0])} "
                f"images and {len(instructions)} instructions."
            )
        side, options = self.model.config.image_size, self.options
        return preprocess(views, side, self.model.device, jpeg=options.jpeg, crop=options.crop)

    def embed_images(
        self, images: dict[str, np.ndarray], instructions: Sequence[str]
    ) -> torch.Tensor:
        """Return patch embeddings (B, V * patches, H); raises as :meth:`pixels`."""
        # Not compiled: its constants come from the CPU, which no CUDA graph may hold.
        pixels = normalize_pixels(self.pixels(images, instructions), self.model.dtype)
        pixels = pixels.reshape(len(instructions), -1, *pixels.shape[-2:])
        if self._is_compiled:  # CUDA graphs may overwrite what they returned in the last pass
            torch.compiler.cudagraph_mark_step_begin()
        return self._embed_pixels(self.model, pixels)

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
