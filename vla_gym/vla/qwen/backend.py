"""QwenOFT (AlphaBrain, starVLA): a Qwen-VL that reads a chunk of actions off its action tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vla_gym.errors import WeightsError
from vla_gym.vla.base import ACTION_SIZE, GRIPPER, ActionOutput
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.files import read_vlm_config
from vla_gym.vla.load_weights import described_by, fill_buffers, load_into
from vla_gym.vla.one_pass import OnePassVLA
from vla_gym.vla.preprocess import check_rows
from vla_gym.vla.qwen.files import find_files, module_name
from vla_gym.vla.qwen.images import RENDER_SIZE, QwenImages, QwenImageSettings, Resize
from vla_gym.vla.qwen.model import MODEL_TYPES, QwenOFT
from vla_gym.vla.qwen.prompt import QwenPrompts
from vla_gym.vla.spec_options import make_options
from vla_gym.vla.statistics import Normalizer, choose_statistics

#: Where the authors' evaluation clients resize renders to, for policies that do not do it.
CLIENT_SIZE = (224, 224)


@dataclass(frozen=True)
class QwenOFTOptions:
    """Options of ``qwen-oft``.

    Attributes:
        unnorm_key: Data set whose statistics scale the actions, if there are several.
        norm_mode: ``"q99"`` or ``"min_max"``; None: the ``norm_mode`` of the statistics, else q99
            for AlphaBrain and min_max for starVLA, as their clients do.
        base_vlm: Folder of the VLM's configuration and tokenizer, if it is elsewhere.
        image_resize: What is done to the 256x256 renders before Qwen's own resizing: ``"bicubic"``
            to the configuration's size, ``"area"`` to 224x224 as in the authors' evaluation
            clients, or ``"none"`` as in AlphaBrain's RL rollouts. None: bicubic if the
            configuration has a size, else area.
        num_views: 1 for a policy that was trained on agentview alone.
        final_norm: See :class:`~vla_gym.vla.qwen.model.QwenOFT`.
        pad_to: Pad every prompt to so many tokens, so that shapes never change.
    """

    unnorm_key: str | None = None
    norm_mode: str | None = None
    base_vlm: str | None = None
    image_resize: Resize | None = None
    num_views: Literal[1, 2] = 2
    final_norm: bool | None = None
    pad_to: int | None = None


class QwenOFTBackend(OnePassVLA):
    """:class:`~vla_gym.vla.base.FrozenVLA` over :class:`~vla_gym.vla.qwen.model.QwenOFT`.

    The hidden states are those of the action tokens, which the action head reads: M = C.

    Attributes:
        model: The network.
        images: Its image pipeline.
        prompts: Its prompts.
    """

    image_size = RENDER_SIZE

    def __init__(
        self,
        name: str,
        model: QwenOFT,
        images: QwenImages,
        prompts: QwenPrompts,
        actions: Normalizer,
        pad_to: int | None,
    ) -> None:
        """Freeze a network; :meth:`from_pretrained` is the usual way to get here."""
        self.name = name
        self.model = model.eval().requires_grad_(False)
        self.images, self.prompts, self.cameras = images, prompts, images.cameras
        self.horizon = self.num_hidden_tokens = prompts.chunk_len
        self.hidden_size = int(model.vlm.config.text_config.hidden_size)
        self._actions, self._pad_to = actions, pad_to

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        compile: bool = False,
        **options: Any,
    ) -> QwenOFTBackend:
        """Load a run's folder of either layout, or one file of weights in it.

        See :func:`vla_gym.vla.load`, :class:`QwenOFTOptions` and :mod:`vla_gym.vla.qwen.files`.
        ``dtype`` is of the VLM's weights, None for bfloat16 on a GPU and float32 elsewhere; the
        action head is float32, as in training.
        """
        chosen = make_options(QwenOFTOptions, options)
        files = find_files(Path(folder), chosen.base_vlm)
        statistics = choose_statistics(files.statistics, chosen.unnorm_key, files.folder)
        action = statistics.get("action") or {}
        mode = chosen.norm_mode or action.get("norm_mode") or files.norm_mode
        actions = Normalizer(action, mode)
        if actions.size != ACTION_SIZE:
            raise WeightsError(
                f"{files.folder}: expected statistics of {ACTION_SIZE} actions, got {actions.size}."
            )
        config = read_vlm_config(files.vlm, MODEL_TYPES)
        images = QwenImages(
            QwenImageSettings.from_pretrained(files.vlm),
            chosen.image_resize or ("bicubic" if files.image_size else "area"),
            files.image_size or CLIENT_SIZE,
            chosen.num_views,
        )
        with described_by(files.vlm):
            with torch.device("meta"):
                model = QwenOFT(config, images.grid, chosen.final_norm)
            fill_buffers(model.vlm)
        prompts = QwenPrompts(
            files.vlm,
            chunk_len=files.chunk_len,
            cot_prompt=files.cot_prompt,
            num_images=chosen.num_views,
            tokens_per_image=images.tokens_per_image,
            image_token_id=config.image_token_id,
            positions=model.rope_positions,
        )
        load_into(
            model,
            Checkpoint(files.weights),
            device=device,
            dtype=dtype,
            rename=partial(module_name, final_norm=model.has_final_norm),
            keep_float32=("action_model.",),
        )
        model.to(device)  # the buffers
        if compile:
            model.vlm.visual.compile()
            model.vlm.language_model.compile()
        return cls(files.folder.name, model, images, prompts, actions, chosen.pad_to)

    def action_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> ActionOutput:
        """Run the network once, without a look at ``proprio``; see TrainableActionVLA."""
        pixels = self.images.pixels(images)
        check_rows(len(pixels), instructions, proprio)
        prompts = [self.prompts.encode(text) for text in instructions]
        device = self.model.device
        patches = self.images.patches(pixels.to(device))
        batch = self.prompts.batch(prompts, self._pad_to).to(device)
        return ActionOutput(*self.model(patches, batch))

    def to_env(self, normalized: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (..., 7) in [-1, 1] of normalised ones."""
        values = normalized.clamp(-1.0, 1.0)
        # A switch before it is scaled, for statistics whose mask leaves the gripper out or not.
        values[..., GRIPPER] = (values[..., GRIPPER] >= 0.5).to(values.dtype)
        actions = self._actions.unnormalize(values).clamp(-1.0, 1.0)
        # The data say 1 for open, LIBERO -1.
        actions[..., GRIPPER] = torch.where(actions[..., GRIPPER] > 0.5, -1.0, 1.0)
        return actions
