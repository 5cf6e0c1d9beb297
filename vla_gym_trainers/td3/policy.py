"""The SB3 policy of TD3+BC on RL tokens: networks, targets, optimisers and their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.td3.networks import (
    ACTION_DIM,
    ChunkActor,
    CriticEnsemble,
    FeatureNormalizer,
    reference_chunk,
)

#: Natural size of one control step's action per dimension: translations use the whole range,
#: rotations of LIBERO's tasks rarely exceed 0.3, the gripper is -1 or +1. It scales exploration
#: noise, residuals and the distance to the reference; it never limits what can be executed.
ACTION_SCALE = (1.0, 1.0, 1.0, 0.3, 0.3, 0.3, 1.0)
Precision = Literal["auto", "fp32", "bf16"]


def uses_bf16(precision: Precision, device: torch.device) -> bool:
    """Return whether hidden layers run in bfloat16; ``auto`` asks for CPU instructions for it."""
    if precision == "auto":
        return device.type == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())
    return precision == "bf16"


class RLTokenPolicy(BasePolicy):
    """SB3 policy that holds actor, critics, their targets, their optimisers and the normaliser.

    Greedy action: ``mu(x, a~)``, the actor's mean. Exploration noise belongs to the algorithm.
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        lr_schedule: Schedule,
        net_arch: Sequence[int] = (256, 256),
        n_critics: int = 4,
        action_scale: Sequence[float] = ACTION_SCALE,
        residual_scale: float = 1.0,
        residual_basis: int = 2,
        precision: Precision = "auto",
        task_heads: Sequence[int] = (),
        use_rl_token: bool = True,
        use_reference: bool = True,
        optimizer_kwargs: dict[str, Any] | None = None,
        **base_kwargs: Any,
    ) -> None:
        """Build all networks.

        Args:
            observation_space: Dict with rl_token (D,), vla_action (C, 7), proprio (P,).
            action_space: Box(-1, 1, (C, 7)).
            lr_schedule: Learning rate as a function of the remaining progress.
            net_arch: Hidden widths of actor and critics: (256, 256) or, for hard tasks,
                (512, 512, 512).
            n_critics: Number of critics, at least 2.
            action_scale: (7,) natural size of each action dimension.
            residual_scale: Largest correction, in units of ``action_scale``.
            residual_basis: See :class:`ChunkActor`.
            precision: Of the hidden layers in training; greedy actions are always fp32.
            task_heads: Tasks with a last layer of their own in actor and critics (shared trunk);
                the policy then plays these tasks only. Empty: one last layer for all tasks.
            use_rl_token: False: actor and critics see proprio without the RL token (ablation).
            use_reference: False: the actor's network does not see the VLA's chunk, which it
                corrects all the same (ablation).
            optimizer_kwargs: Passed on to Adam.
            **base_kwargs: Passed on to SB3's BasePolicy.

        Raises:
            ConfigError: If the spaces or a setting do not fit.
        """
        super().__init__(observation_space, action_space, **base_kwargs)
        chunk_len = check_spaces(observation_space, action_space)
        if n_critics < 2:
            raise ConfigError(f"n_critics must be at least 2 (twin critics), got {n_critics}.")
        if residual_basis < 0:
            raise ConfigError(f"residual_basis must not be negative, got {residual_basis}.")
        if len(action_scale) != ACTION_DIM or min(action_scale) <= 0:
            raise ConfigError(f"action_scale must be 7 positive numbers, got {action_scale}.")
        self.settings: dict[str, Any] = {
            "net_arch": tuple(net_arch),
            "n_critics": n_critics,
            "action_scale": tuple(action_scale),
            "residual_scale": residual_scale,
            "residual_basis": residual_basis,
            "precision": precision,
            "task_heads": tuple(task_heads),
            "use_rl_token": use_rl_token,
            "use_reference": use_reference,
            "optimizer_kwargs": optimizer_kwargs,
        }
        self.precision: Precision = precision
        token_dim = _size(observation_space["rl_token"])
        proprio_dim = _size(observation_space["proprio"])
        action_size = chunk_len * ACTION_DIM
        scale = torch.tensor(action_scale, dtype=torch.float32)
        self.chunk_scale: Tensor
        self.register_buffer("chunk_scale", scale.repeat(chunk_len))
        self.normalizer = FeatureNormalizer(token_dim, proprio_dim, use_token=use_rl_token)
        state_dim = self.normalizer.state_dim
        limit = residual_scale * scale
        self.head_of_task: Tensor | None
        self.register_buffer("head_of_task", _head_of_task(observation_space, task_heads), False)
        heads = max(1, len(task_heads))

        def actor() -> ChunkActor:
            return ChunkActor(
                state_dim, chunk_len, net_arch, limit, residual_basis, heads, use_reference
            )

        def critic() -> CriticEnsemble:
            return CriticEnsemble(state_dim, action_size, net_arch, n_critics, heads)

        self.actor, self.actor_target = actor(), actor()
        self.critic, self.critic_target = critic(), critic()
        self.actor_target.load_state_dict(self.actor.state_dict())
        self.critic_target.load_state_dict(self.critic.state_dict())
        self.actor_target.requires_grad_(False)
        self.critic_target.requires_grad_(False)
        rate, extra = lr_schedule(1.0), optimizer_kwargs or {}
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), rate, fused=True, **extra)
        self.critic_optimizer = torch.optim.Adam(
            self.critic.parameters(), rate, fused=True, **extra
        )

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        data.update(self.settings, lr_schedule=self._dummy_schedule)
        return data

    def forward(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        """Return the mean chunk, (B, C * 7)."""
        return self._predict(observation, deterministic)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:  # noqa: ARG002
        assert isinstance(observation, dict)
        x, reference = self.normalizer(observation), reference_chunk(observation)
        return self.actor(x, reference, head=self.heads(observation))

    def heads(self, observation: dict[str, Tensor]) -> Tensor | None:
        """Return the head of each row, (B,) int64; None if all tasks share one.

        Raises:
            ConfigError: If a task has no head.
        """
        if self.head_of_task is None:
            return None
        tasks = observation["task_id"].long().reshape(-1)
        heads = self.head_of_task.to(tasks.device)[tasks]
        if bool((heads < 0).any()):
            alien = sorted(set(tasks[heads < 0].tolist()))
            raise ConfigError(
                f"This policy has heads for tasks {list(self.settings['task_heads'])} only, not "
                f"for {alien}."
            )
        return heads


def check_spaces(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> int:
    """Check the spaces of a frozen-VLA environment.

    Returns:
        The chunk length C.

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
        or shape[1] != ACTION_DIM
        or shape != observation_space["vla_action"].shape
        or not (np.all(action_space.low == -1.0) and np.all(action_space.high == 1.0))
    ):
        raise ConfigError(
            "Expected an action Box(-1, 1, (C, 7)) of the shape of observation['vla_action'] "
            f"{observation_space['vla_action'].shape}, got {action_space}."
        )
    return int(shape[0])


def _head_of_task(space: spaces.Dict, task_heads: Sequence[int]) -> Tensor | None:
    """Return (number of tasks,) int64: the head of each task, -1 for none."""
    if not task_heads:
        return None
    tasks = space.get("task_id")
    if not isinstance(tasks, spaces.Discrete):
        raise ConfigError("task_heads needs a Discrete 'task_id' in the observation.")
    valid = all(0 <= task < tasks.n for task in task_heads)
    if not valid or len(set(task_heads)) != len(task_heads):
        raise ConfigError(
            f"task_heads must be different tasks in 0..{tasks.n - 1}, got {tuple(task_heads)}."
        )
    table = torch.full((int(tasks.n),), -1)
    table[list(task_heads)] = torch.arange(len(task_heads))
    return table


def _size(space: spaces.Space[Any]) -> int:
    assert space.shape is not None
    return int(np.prod(space.shape))
