"""OpenVLA-OFT: all tokens of a chunk at once, with attention in both directions.

After "Fine-Tuning Vision-Language-Action Models: Optimizing Speed and Success" (arXiv 2502.19645).
The reference computes one observation at a time; here rows with any instructions share a forward
pass. Not covered: FiLM and the diffusion head, which no checkpoint for LIBERO uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.vla.base import TokenOutput, VLAOutput
from vla_gym.vla.checkpoint_files import Checkpoint, find_file, load_into
from vla_gym.vla.cost import Cost
from vla_gym.vla.openvla_base import Loaded, OpenVLABase, load_parts
from vla_gym.vla.openvla_cost import parallel_cost
from vla_gym.vla.openvla_heads import (
    ACTION_SIZE,
    PROPRIO_SIZE,
    L1ActionHead,
    ProprioProjector,
)
from vla_gym.vla.openvla_sequence import Tokenizer, parallel_sequences
from vla_gym.vla.statistics import Normalizer
from vla_gym.vla.token_head import OnePassTokens
from vla_gym.vla.tokens import bins_to_actions

_EPSILON = 1e-8  # of OpenVLA-OFT's normalisation


class OpenVLAOFTBackend(OnePassTokens, OpenVLABase):
    """:class:`~vla_gym.vla.base.TrainableTokenVLA` over an OpenVLA-OFT checkpoint.

    The hidden states are those that the action head reads: of the token before the placeholders
    and of all placeholders but the last.
    """

    def __init__(
        self,
        parts: Loaded,
        action_head: L1ActionHead | None,
        proprio_projector: ProprioProjector | None,
        *,
        num_views: int,
        head: str | None = None,
        horizon: int = 8,
        append_stop: bool = True,
        group_prompts: bool = False,
        pad_prompt_to: int | None = None,
        compile: bool = False,
        compile_mode: str = "default",
        jpeg: bool = True,
        crop: bool = True,
    ) -> None:
        """Put the parts together; :meth:`from_pretrained` describes the options."""
        super().__init__(
            parts,
            horizon=horizon,
            num_views=num_views,
            epsilon=_EPSILON,
            compile=compile,
            compile_mode=compile_mode,
            jpeg=jpeg,
            crop=crop,
        )
        if group_prompts and pad_prompt_to is not None:
            raise ConfigError("Choose either group_prompts or pad_prompt_to, not both.")
        self.action_head, self.proprio_projector = action_head, proprio_projector
        self.append_stop = append_stop
        self.group_prompts, self.pad_prompt_to = group_prompts, pad_prompt_to
        self.head = head or ("token" if action_head is None else "l1")
        if proprio_projector is not None:
            self.proprio_normalizer = Normalizer(
                parts.statistics.get("proprio", {}), epsilon=_EPSILON, clip=True
            )

    @property
    def head(self) -> str:
        """``"l1"`` or ``"token"``: which head ``infer`` takes the actions from.

        Raises:
            ConfigError: On setting one that there is not.
        """
        return self._head

    @head.setter
    def head(self, head: str) -> None:
        known = ("token",) if self.action_head is None else ("l1", "token")
        if head not in known:
            raise ConfigError(
                f"The checkpoint {self.name!r} has no head {head!r}, but {' and '.join(known)}."
            )
        self._head = head

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        compile: bool = False,
        compile_mode: str = "default",
        unnorm_key: str | None = None,
        num_views: int | None = None,
        head: str | None = None,
        horizon: int = 8,
        append_stop: bool = True,
        group_prompts: bool = False,
        pad_prompt_to: int | None = None,
        tokenizer: str | Path | Tokenizer | None = None,
        jpeg: bool = True,
        crop: bool = True,
    ) -> OpenVLAOFTBackend:
        """Load a checkpoint folder.

        Args:
            folder: With config.json, the weights, tokenizer.json, dataset_statistics.json and, if
                the policy has them, ``action_head--*_checkpoint.pt`` and
                ``proprio_projector--*_checkpoint.pt``.
            device: Torch device.
            dtype: None: bfloat16 on a GPU, float32 on a CPU.
            compile: Whether to compile vision towers and Llama.
            compile_mode: ``"reduce-overhead"`` and ``"max-autotune"`` record CUDA graphs, one for
                each batch size and length: give ``pad_prompt_to`` with them.
            unnorm_key: Data set, if the statistics are of several; ``libero_goal`` stands for
                ``libero_goal_no_noops`` too.
            num_views: 1 or 2; None: 2 for a policy that reads proprioception, else 1.
            head: ``"l1"`` or ``"token"``; None: l1 where there is one.
            horizon: Actions in a chunk, as it was trained.
            append_stop: Whether ``</s>`` follows the placeholders: False for policies of RLinf.
            group_prompts: Whether rows with prompts of one length are computed together, without
                padding and thus without a mask, one such group after the other.
            pad_prompt_to: Length in tokens that all prompts are padded to, so that shapes never
                change (for CUDA graphs).
            tokenizer: File or folder of another tokenizer.json, or a function from text to ids.
            jpeg: Whether images are compressed as the training data was.
            crop: Whether images are cropped, as is right for training on random crops.

        Raises:
            ConfigError: If options do not fit the checkpoint.
            WeightsError: If files are missing, damaged or do not fit.
            NotEnoughMemoryError: If the device has too little memory.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise WeightsError(f"Expected the folder of an OpenVLA-OFT checkpoint, got {folder}.")
        head_file = find_file(folder, "action_head", "checkpoint")
        proprio_file = find_file(folder, "proprio_projector", "checkpoint")
        parts = load_parts(folder, device, dtype, unnorm_key, tokenizer)
        width, dtype = parts.model.config.text.hidden_size, parts.model.dtype
        action_head = proprio_projector = None
        if head_file is not None:
            action_head = L1ActionHead(width).eval().requires_grad_(False)
            load_into(action_head, Checkpoint(head_file), device=device, dtype=dtype)
        if proprio_file is not None:
            proprio_projector = ProprioProjector(PROPRIO_SIZE, width).eval().requires_grad_(False)
            load_into(proprio_projector, Checkpoint(proprio_file), device=device, dtype=dtype)
        if num_views is None:
            num_views = 1 if proprio_projector is None else 2
        return cls(
            parts,
            action_head,
            proprio_projector,
            num_views=num_views,
            head=head,
            horizon=horizon,
            append_stop=append_stop,
            group_prompts=group_prompts,
            pad_prompt_to=pad_prompt_to,
            compile=compile,
            compile_mode=compile_mode,
            jpeg=jpeg,
            crop=crop,
        )

    def hidden_states(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> torch.Tensor:
        """Return the states (B, M, H) that predict actions, with gradients where there are any.

        Args:
            images: As in :meth:`infer`.
            instructions: As in :meth:`infer`.
            proprio: As in :meth:`infer`.

        Raises:
            ConfigError: If shapes, dtypes or batch sizes do not fit.
        """
        observed = self.embed_images(self.pixels(images, instructions), len(instructions))
        return self.decode(self.observe(observed, proprio), self.prompts(instructions))

    def observe(self, patches: torch.Tensor, proprio: np.ndarray) -> torch.Tensor:
        """Append the token of proprioception (B, 8) to patches (B, P, H), if the policy has one.

        Raises:
            ConfigError: If the shape is another.
        """
        if self.proprio_projector is None:
            return patches
        if proprio.shape != (len(patches), PROPRIO_SIZE):
            raise ConfigError(f"Expected proprio ({len(patches)}, 8), got {proprio.shape}.")
        values = torch.from_numpy(np.asarray(proprio, np.float64))
        values = self.proprio_normalizer.normalize(values).to(patches.device, patches.dtype)
        return torch.cat([patches, self.proprio_projector(values)[:, None]], dim=1)

    def decode(self, observed: torch.Tensor, prompts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Run the Llama.

        Args:
            observed: (B, P, H).
            prompts: Ids of each row.

        Returns:
            (B, M, H) in the model's dtype.
        """
        lengths = [len(ids) for ids in prompts]
        if not self.group_prompts or len(set(lengths)) == 1:
            return self._decode(observed, prompts)
        groups = [[i for i, n in enumerate(lengths) if n == size] for size in sorted(set(lengths))]
        parts = [self._decode(observed[group], [prompts[i] for i in group]) for group in groups]
        order = torch.tensor([i for group in groups for i in group], device=observed.device)
        return torch.cat(parts)[order.argsort()]

    def _decode(self, observed: torch.Tensor, prompts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        sequences = parallel_sequences(
            self.model,
            observed,
            prompts,
            self.num_hidden_tokens,
            append_stop=self.append_stop,
            pad_prompt_to=self.pad_prompt_to,
        )
        return self._run_layers(
            self.model.llama,
            sequences.embeddings,
            sequences.positions,
            rows=sequences.rows,
            mask=sequences.mask,
        )

    @torch.no_grad()
    def infer(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> VLAOutput:
        """Predict one chunk per row; see :class:`~vla_gym.vla.base.FrozenVLA`.

        Raises:
            ConfigError: If shapes, dtypes or batch sizes do not fit.
        """
        hidden = self.hidden_states(images, instructions, proprio)
        return VLAOutput(hidden.float(), self.to_env(self.normalized_actions(hidden)))

    def normalized_actions(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the actions (B, C, 7) float32 of states (B, M, H), normalised; greedy."""
        if self.head == "l1":
            assert self.action_head is not None
            return self.action_head(hidden).float()
        return bins_to_actions(self.token_logits(hidden).argmax(dim=-1))

    def token_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, C, 7, 256) float32 of states (B, M, H)."""
        return self.model.action_logits(hidden).unflatten(1, (self.horizon, ACTION_SIZE))

    def token_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> TokenOutput:
        """Run the network once; see :class:`~vla_gym.vla.base.TrainableTokenVLA`.

        Raises:
            ConfigError: If inputs do not fit.
        """
        hidden = self.hidden_states(images, instructions, proprio)
        return TokenOutput(hidden, self.token_logits(hidden))

    def cost(self, instruction: str) -> Cost:
        """Return the cost of a chunk; see :class:`~vla_gym.vla.cost.CountsCost`."""
        return parallel_cost(
            self.model.config,
            views=self.num_views,
            prompt=self.pad_prompt_to or len(self.prompts([instruction])[0]),
            horizon=self.horizon,
            stop=self.append_stop,
            proprio=self.proprio_projector is not None,
            l1=self.head == "l1",
            itemsize=self.model.dtype.itemsize,
        )
