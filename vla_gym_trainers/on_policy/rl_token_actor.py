"""The network of PPO and GRPO on the RL token: what is saved, and what plays greedily."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vla_gym.errors import WeightsError
from vla_gym.suites.libero.spec import ACTION, PROPRIO
from vla_gym_trainers.networks import (
    ChunkActor,
    FeatureNormalizer,
    reference_chunk,
)

WEIGHTS, SIZES = "rl_token_actor.safetensors", "rl_token_actor.json"


class RLTokenActor(nn.Module):
    """Normaliser, actor and sigma: what is saved of a policy, and what plays greedily.

    Attributes:
        sizes: Arguments that make it.
        action_space: Of what it plays.
        observation_space: What it looks at.
        guarded_tasks: None: it plays all tasks itself.
        log_std: (N,) logarithm of sigma, per action dimension.
    """

    def __init__(
        self,
        token_dim: int,
        chunk_len: int,
        net_arch: Sequence[int] = (256, 256),
        residual_scale: float = 1.0,
        residual_basis: int = 2,
        sigma: float = 0.05,
        *,
        proprio_dim: int = PROPRIO.size,
        action_scale: Sequence[float] = ACTION.scales,
    ) -> None:
        """Begin at the VLA; see ``PPOConfig`` and, for ``action_scale``, ``ActionSpec.scale``."""
        super().__init__()
        self.sizes: dict[str, Any] = {
            "token_dim": token_dim,
            "chunk_len": chunk_len,
            "net_arch": list(net_arch),
            "residual_scale": residual_scale,
            "residual_basis": residual_basis,
            "proprio_dim": proprio_dim,
            "action_scale": list(action_scale),
        }
        self.action_space = spaces.Box(-1.0, 1.0, (chunk_len, len(action_scale)), np.float32)
        self.observation_space = spaces.Dict(
            {
                "rl_token": spaces.Box(-np.inf, np.inf, (token_dim,), np.float32),
                "vla_action": self.action_space,
                "proprio": spaces.Box(-np.inf, np.inf, (proprio_dim,), np.float32),
            }
        )
        self.guarded_tasks: tuple[int, ...] = ()
        self.normalizer = FeatureNormalizer(token_dim, proprio_dim)
        limit = residual_scale * torch.tensor(action_scale, dtype=torch.float32)
        self.actor = ChunkActor(
            self.normalizer.state_dim, chunk_len, net_arch, limit, residual_basis
        )
        self.log_std = nn.Parameter(torch.full((len(action_scale),), math.log(sigma)))

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        """Return the mean corrections (B, K, N) of features (``rl_token``, ...)."""
        return self.actor.coefficients(self.normalizer(observation), reference_chunk(observation))

    def chunk(self, correction: Tensor, reference: Tensor) -> Tensor:
        """Return the chunks (B, C, N) that corrections (B, K, N) make of the VLA's, the same."""
        return self.actor.chunk(correction, reference.flatten(1)).reshape(reference.shape)

    @torch.no_grad()
    def predict(
        self,
        observation: Mapping[str, np.ndarray],
        state: None = None,  # noqa: ARG002
        episode_start: None = None,  # noqa: ARG002
        deterministic: bool = True,  # noqa: ARG002
    ) -> tuple[np.ndarray, None]:
        """Return the mean chunks (B, C, N) in [-1, 1], called as the policies of SB3 are.

        Args:
            observation: As ``LiberoVLA-*`` has it, one row (no leading dimension) or B.
            state: Not used.
            episode_start: Not used.
            deterministic: Not used: it never draws.
        """
        names = ("rl_token", "proprio", "vla_action")
        tensors = {name: torch.as_tensor(np.asarray(observation[name])) for name in names}
        if single := tensors["proprio"].ndim == 1:
            tensors = {name: tensor[None] for name, tensor in tensors.items()}
        chunks = self.chunk(self(tensors), tensors["vla_action"]).numpy()
        return (chunks[0] if single else chunks), None

    def save(self, folder: Path) -> None:
        """Write the weights, and the sizes that :meth:`load` makes it with."""
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / WEIGHTS)
        (folder / SIZES).write_text(json.dumps(self.sizes) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> RLTokenActor:
        """Read what :meth:`save` wrote, on the CPU.

        Raises:
            WeightsError: If a file is missing or damaged.
        """
        try:
            actor = cls(**json.loads((folder / SIZES).read_text(encoding="utf-8")))
            actor.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
            raise WeightsError(f"{folder} holds no whole RL-token actor: {error}") from error
        return actor.eval()
