"""The SB3 policy of TD3+BC on RL tokens: networks, targets, optimisers and their settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.networks import (
    ChunkActor,
    CriticEnsemble,
    FeatureNormalizer,
    reference_chunk,
)
from vla_gym_trainers.td3.config import TD3Config
from vla_gym_trainers.world_model.protocol import world_memory_size


class RLTokenPolicy(BasePolicy):
    """SB3 policy that holds actor, critics, their targets, their optimisers and the normaliser.

    Greedy action: ``mu(x, a~)``, the actor's mean. Exploration noise belongs to the algorithm.
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        lr_schedule: Schedule,
        config: TD3Config | None = None,
        **base_kwargs: Any,
    ) -> None:
        """Build all networks.

        Args:
            observation_space: Dict with rl_token (D,), vla_action (C, N), proprio (P,), and
                perhaps a world model's world_memory (S,).
            action_space: Box(-1, 1, (C, N)).
            lr_schedule: Learning rate as a function of the remaining progress.
            config: Sizes of the networks and what they see; None for the defaults.
            **base_kwargs: Passed on to SB3's BasePolicy.

        Raises:
            ConfigError: If the spaces do not fit.
        """
        super().__init__(observation_space, action_space, **base_kwargs)
        self.config = config = config or TD3Config()
        chunk_len, action_size = check_spaces(observation_space, action_space)
        scale = torch.tensor(config.scale_of(action_size), dtype=torch.float32)
        self.chunk_scale: Tensor
        self.register_buffer("chunk_scale", scale.repeat(chunk_len))
        self.normalizer = FeatureNormalizer(
            _size(observation_space["rl_token"]),
            _size(observation_space["proprio"]),
            use_token=config.use_rl_token,
            world_memory_dim=world_memory_size(observation_space),
        )
        state_dim = self.normalizer.state_dim

        def actor() -> ChunkActor:
            return ChunkActor(
                state_dim,
                chunk_len,
                config.net_arch,
                config.residual_scale * scale,
                config.residual_basis,
                config.use_reference,
                plain=config.actor == "plain",
            )

        def critic() -> CriticEnsemble:
            return CriticEnsemble(
                state_dim, chunk_len * action_size, config.net_arch, config.n_critics
            )

        self.actor, self.actor_target = actor(), actor()
        self.critic, self.critic_target = critic(), critic()
        self.actor_target.load_state_dict(self.actor.state_dict())
        self.critic_target.load_state_dict(self.critic.state_dict())
        self.actor_target.requires_grad_(False)
        self.critic_target.requires_grad_(False)
        rate = lr_schedule(1.0)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), rate, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), rate, fused=True)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        data.update(config=self.config, lr_schedule=self._dummy_schedule)
        return data

    def forward(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        """Return the mean chunk, (B, C * N)."""
        return self._predict(observation, deterministic)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:  # noqa: ARG002
        assert isinstance(observation, dict)
        mean: Tensor = self.actor(self.normalizer(observation), reference_chunk(observation))
        return mean


def check_spaces(
    observation_space: spaces.Space[Any], action_space: spaces.Space[Any]
) -> tuple[int, int]:
    """Check the spaces of a frozen-VLA environment.

    Returns:
        The chunk length C and the action size N.

    Raises:
        ConfigError: If a key is missing or the action is not the shape of ``vla_action``.
    """
    keys = {"rl_token", "vla_action", "proprio"}
    if not isinstance(observation_space, spaces.Dict) or not keys <= set(observation_space.keys()):
        raise ConfigError(
            f"Expected a Dict observation with {sorted(keys)}, got {observation_space}. Use a "
            "LiberoVLA-* environment or wrappers.FrozenVLAObservation."
        )
    shape = action_space.shape
    if (
        not isinstance(action_space, spaces.Box)
        or shape is None
        or len(shape) != 2
        or shape != observation_space["vla_action"].shape
        or not (np.all(action_space.low == -1.0) and np.all(action_space.high == 1.0))
    ):
        raise ConfigError(
            "Expected an action Box(-1, 1, (C, N)) of the shape of observation['vla_action'] "
            f"{observation_space['vla_action'].shape}, got {action_space}."
        )
    return int(shape[0]), int(shape[1])


def _size(space: spaces.Space[Any]) -> int:
    assert space.shape is not None
    return int(np.prod(space.shape))
