"""QwenOFT (AlphaBrain, starVLA): a Qwen-VL that reads a chunk of actions off its action tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.vla.base import ACTION_SIZE, GRIPPER, FrozenVLA, VLAOutput
from vla_gym.vla.checkpoint_files import Checkpoint, default_dtype, load_into
from vla_gym.vla.preprocess import check_rows
from vla_gym.vla.qwen.files import QwenOFTFiles, find_files, module_name
from vla_gym.vla.qwen.images import RENDER_SIZE, QwenImages, QwenImageSettings
from vla_gym.vla.qwen.model import QwenOFT, build, read_config
from vla_gym.vla.qwen.prompt import QwenPrompts, state_text
from vla_gym.vla.statistics import Normalizer, choose_statistics

#: Where the authors' evaluation clients resize renders to, for policies that do not do it.
CLIENT_SIZE = (224, 224)


class QwenOFTBackend(FrozenVLA):
    """:class:`~vla_gym.vla.base.FrozenVLA` over :class:`~vla_gym.vla.qwen.model.QwenOFT`.

    The hidden states are those of the action tokens, which the action head reads: M = C.

    Attributes:
        model: The network.
        images: Its image pipeline.
        prompts: Its prompts.
    """

    def __init__(
        self,
        model: QwenOFT,
        images: QwenImages,
        prompts: QwenPrompts,
        actions: Normalizer,
        *,
        name: str,
        states: Normalizer | None = None,
        pad_to: int | None = None,
    ) -> None:
        """Freeze a network; :meth:`from_pretrained` is the usual way to get here.

        Args:
            model: On its device.
            images: See the class.
            prompts: See the class.
            actions: Scales actions.
            name: Name of the checkpoint.
            states: Scales the proprioception that is written into the prompt; None for none.
            pad_to: See :meth:`from_pretrained`.
        """
        self.model = model.eval().requires_grad_(False)
        self.images, self.prompts = images, prompts
        self.name = name
        self.horizon = self.num_hidden_tokens = prompts.chunk_len
        self.hidden_size = int(model.vlm.config.text_config.hidden_size)
        self.image_size = RENDER_SIZE
        self._actions, self._states = actions, states
        self._pad_to = pad_to

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        compile: bool = False,
        unnorm_key: str | None = None,
        norm_mode: str | None = None,
        base_vlm: str | None = None,
        image_resize: str | None = None,
        num_views: int = 2,
        state_in_prompt: bool = False,
        final_norm: bool | None = None,
        pad_to: int | None = None,
    ) -> QwenOFTBackend:
        """Load a checkpoint of either layout; see :mod:`vla_gym.vla.qwen.files`.

        Args:
            folder: The run's folder, or one file of weights in it.
            device: Torch device.
            dtype: Of the VLM's weights; None: bfloat16 on CUDA, float32 elsewhere. The action head
                is float32, as in training.
            compile: Whether to compile vision tower and language model.
            unnorm_key: Data set whose statistics scale the actions, if there are several.
            norm_mode: ``"q99"`` or ``"min_max"``; None: the ``norm_mode`` of the statistics, else
                q99 for AlphaBrain and min_max for starVLA, as their clients do.
            base_vlm: Folder of the VLM's configuration and tokenizer, if it is elsewhere.
            image_resize: What is done to the 256x256 renders before Qwen's own resizing:
                ``"bicubic"`` to the configuration's size, ``"area"`` to 224x224 as in the authors'
                evaluation clients, or ``"none"`` as in AlphaBrain's RL rollouts. None: bicubic if
                the configuration has a size, else area.
            num_views: 1 for a policy that was trained on agentview alone.
            state_in_prompt: Whether the policy was trained with the state in the prompt.
            final_norm: See :class:`~vla_gym.vla.qwen.model.QwenOFT`.
            pad_to: Pad every prompt to so many tokens, so that shapes never change.

        Raises:
            ConfigError: If an option is out of range or a choice must be made.
            WeightsError: If a file is missing, damaged or does not fit.
            NotEnoughMemoryError: If the weights do not fit the device.
        """
        files = find_files(Path(folder), base_vlm)
        stats = choose_statistics(files.statistics, unnorm_key, files.folder)[1]
        actions = _normalizer(stats, "action", norm_mode, files)
        if actions.size != ACTION_SIZE:
            raise WeightsError(
                f"{files.folder}: expected statistics of {ACTION_SIZE} actions, got {actions.size}."
            )
        config = read_config(files.vlm)
        images = QwenImages(
            QwenImageSettings.from_pretrained(files.vlm),
            image_resize or ("bicubic" if files.image_size else "area"),
            files.image_size or CLIENT_SIZE,
            num_views,
        )
        model = build(config, images.grid, final_norm)
        prompts = QwenPrompts(
            files.vlm,
            chunk_len=files.chunk_len,
            cot_prompt=files.cot_prompt,
            num_images=num_views,
            tokens_per_image=images.tokens_per_image,
            image_token_id=config.image_token_id,
            positions=model.rope_positions,
        )
        load_into(
            model,
            Checkpoint(files.weights),
            device=device,
            dtype=default_dtype(device, dtype),
            rename=module_name,
            ignore=() if model.has_final_norm else (r".*\.language_model\.norm\.weight",),
            keep_float32=("action_model.",),
        )
        model.to(device)  # the buffers
        if compile:
            model.vlm.visual.compile()
            model.vlm.language_model.compile()
        return cls(
            model,
            images,
            prompts,
            actions,
            name=files.folder.name,
            states=_normalizer(stats, "state", norm_mode, files) if state_in_prompt else None,
            pad_to=pad_to,
        )

    def forward(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Preprocess and run the network, with gradients where its parameters have them.

        Args:
            images: As in :meth:`infer`.
            instructions: As in :meth:`infer`.
            proprio: As in :meth:`infer`.

        Returns:
            Hidden states (B, C, H) float32 and normalised actions (B, C, 7) float32.

        Raises:
            ConfigError: If shapes, dtypes or batch sizes do not fit.
        """
        pixels = self.images.pixels(images)
        proprio = np.asarray(proprio)
        check_rows(len(pixels), instructions, proprio)
        prompts = [self.prompts.encode(text) for text in self._with_state(instructions, proprio)]
        device = self.model.device
        patches = self.images.patches(pixels.to(device))
        batch = self.prompts.batch(prompts, self._pad_to).to(device)
        output: tuple[torch.Tensor, torch.Tensor] = self.model(patches, batch)
        return output

    @torch.no_grad()
    def infer(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> VLAOutput:
        """Predict one chunk per row; see :class:`~vla_gym.vla.base.FrozenVLA`.

        Args:
            images: ``agentview`` and ``wrist``, each (B, 256, 256, 3) uint8, upright.
            instructions: B instructions.
            proprio: (B, 8); only used with ``state_in_prompt``.

        Raises:
            ConfigError: If shapes, dtypes or batch sizes do not fit.
        """
        hidden, normalized = self.forward(images, instructions, proprio)
        return VLAOutput(hidden, self.to_env_actions(normalized))

    def to_env_actions(self, normalized: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (..., 7) in [-1, 1] of normalised ones."""
        values = normalized.clamp(-1.0, 1.0)
        # A switch before it is scaled, for statistics whose mask leaves the gripper out or not.
        values[..., GRIPPER] = (values[..., GRIPPER] >= 0.5).to(values.dtype)
        actions = self._actions.unnormalize(values).clamp(-1.0, 1.0)
        # The data say 1 for open, LIBERO -1.
        actions[..., GRIPPER] = torch.where(actions[..., GRIPPER] > 0.5, -1.0, 1.0)
        return actions

    def _with_state(self, instructions: list[str], proprio: np.ndarray) -> list[str]:
        if self._states is None:
            return instructions
        if proprio.ndim != 2 or proprio.shape[1] != self._states.size:
            raise ConfigError(
                f"Expected proprio of shape (B, {self._states.size}), got {proprio.shape}."
            )
        values = self._states.normalize(torch.from_numpy(proprio.astype(np.float64))).numpy()
        return [
            f"{instruction} [STATE] {text} [ACTION]"
            for instruction, text in zip(instructions, state_text(values), strict=True)
        ]


def _normalizer(
    stats: dict, quantity: str, norm_mode: str | None, files: QwenOFTFiles
) -> Normalizer:
    found = stats.get(quantity)
    if not found:
        raise WeightsError(f"The statistics in {files.folder} have none of {quantity!r}.")
    return Normalizer(found, norm_mode or found.get("norm_mode") or files.norm_mode)
