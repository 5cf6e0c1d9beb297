"""OpenVLA's network: vision towers, projector, Llama and OFT's heads, with the published keys."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from vla_gym.vla.base import ACTION_SIZE, PROPRIO_SIZE
from vla_gym.vla.blocks import ResidualMLP
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.load_weights import described_by, load_into
from vla_gym.vla.openvla.config import OpenVLAConfig
from vla_gym.vla.openvla.vision import VisionTower
from vla_gym.vla.tokens import NUM_BINS


class _VisionBackbone(nn.Module):
    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        self.featurizer = VisionTower(config.towers[0])
        self.fused_featurizer = VisionTower(config.towers[1])

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map (N, 6, S, S) to (N, patches, sum of widths)."""
        return torch.cat(
            [self.featurizer(pixels[:, :3]), self.fused_featurizer(pixels[:, 3:])], dim=-1
        )


class OpenVLAModel(nn.Module):
    """The network; :mod:`vla_gym.vla.openvla.sequence` puts its sequences together.

    Attributes:
        config: Its sizes.
    """

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        self.config = config
        self.vision_backbone = _VisionBackbone(config)
        width, text_width = sum(t.width for t in config.towers), config.text.hidden_size
        # From the fused features of a patch to a Llama embedding.
        self.projector = nn.Sequential(
            OrderedDict(
                fc1=nn.Linear(width, 4 * width),
                act1=nn.GELU(),
                fc2=nn.Linear(4 * width, text_width),
                act2=nn.GELU(),
                fc3=nn.Linear(text_width, text_width),
            )
        )
        self.language_model = LlamaForCausalLM(config.text)

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: Checkpoint,
        config: OpenVLAConfig,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> OpenVLAModel:
        """Load weights; those that OpenVLA never uses are left out.

        Raises:
            WeightsError: If keys are missing, left over or of other shapes.
            NotEnoughMemoryError: If the device has too little.
        """
        with described_by(checkpoint.path), torch.device("meta"):
            model = cls(config)
        unused = tuple(
            f"vision_backbone.{name}.{beginning}"
            for name, tower in zip(("featurizer", "fused_featurizer"), config.towers, strict=True)
            for beginning in (f"blocks.{tower.depth - 1}.", "norm.", "attn_pool.")
        )
        load_into(
            model,
            checkpoint,
            device=device,
            dtype=dtype,
            rename=lambda name: None if name.startswith(unused) else name,
        )
        # Its frequencies are in no checkpoint, and stay in float32.
        model.llama.rotary_emb = LlamaRotaryEmbedding(config.text).to(device)
        return model.eval()

    @property
    def llama(self) -> nn.Module:
        """The Llama without its head."""
        return self.language_model.model

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        """Of the weights."""
        return self.embed_tokens.weight.device

    @property
    def embed_tokens(self) -> nn.Embedding:
        """The table of token embeddings."""
        table = self.language_model.get_input_embeddings()
        assert isinstance(table, nn.Embedding)
        return table

    def embed_pixels(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map normalised pixels (B, 6 * V, S, S) to embeddings (B, V * patches, H).

        Of each view there are 3 channels for DINOv2 and 3 for SigLIP, in the model's dtype.
        """
        batch = len(pixels)
        features = self.vision_backbone(pixels.reshape(-1, 6, *pixels.shape[-2:]))
        projected: torch.Tensor = self.projector(features)
        return projected.reshape(batch, -1, projected.shape[-1])

    def action_ids(self, bins: torch.Tensor) -> torch.Tensor:
        """Return the ids of bins 0..255: the vocabulary's last, the lowest action the highest."""
        return self.config.action_vocab_end - 1 - bins

    def action_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map states (..., H) to float32 logits (..., 256) of the bins, lowest action first.

        Only the 256 action ids compete, see :meth:`action_ids`.
        """
        end = self.config.action_vocab_end
        head = self.language_model.lm_head
        if type(head) is nn.Linear:  # the others' 31,808 rows are left out
            logits = F.linear(hidden, head.weight[end - NUM_BINS : end])
        else:  # with adapters around it
            logits = head(hidden)[..., end - NUM_BINS : end]
        return logits.flip(-1).float()


class L1ActionHead(nn.Module):
    """OpenVLA-OFT's: regresses one action from the states of its seven tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.model = ResidualMLP(ACTION_SIZE * width, width, ACTION_SIZE)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map states (B, C * 7, H) to normalised actions (B, C, 7)."""
        actions: torch.Tensor = self.model(hidden.unflatten(1, (-1, ACTION_SIZE)).flatten(2))
        return actions


def proprio_projector(width: int) -> nn.Sequential:
    """Return OpenVLA-OFT's: from normalised proprioception (B, 8) to one more token (B, width)."""
    fc1, fc2 = nn.Linear(PROPRIO_SIZE, width), nn.Linear(width, width)
    return nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(), fc2=fc2))
