"""The SB3 policy of TD3+BC on RL tokens: networks, targets, optimisers and their settings.

It is saved as one safetensors file, weights and a header of plain JSON: SB3's zip files hold
pickles, which run code when they are read. This is what a run leaves and ``vla-gym eval`` takes.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import ChunkLength, Object, Size, one_line, parse_json, to_type
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.load_weights import described_by, load_into
from vla_gym_trainers.networks import (
    ChunkActor,
    CriticEnsemble,
    FeatureNormalizer,
    reference_chunk,
)
from vla_gym_trainers.runs.torch_helpers import save_parameters
from vla_gym_trainers.td3.algorithm_config import TD3Config
from vla_gym_trainers.world_model.protocol import WORLD_MEMORY, world_memory_size

_HEADER, _FORMAT = "rl_token_policy", 1
_Tasks = Annotated[int, Meta(ge=0, le=2**20)]


class _Header(Struct):
    format: Literal[1]
    token_dim: Size
    proprio_dim: Size
    chunk_len: ChunkLength
    action_size: Size
    guarded_tasks: list[_Tasks]
    num_tasks: Annotated[int, Meta(ge=1, le=2**20)] | None
    config: Object
    world_memory_dim: Annotated[int, Meta(ge=0, le=2**20)]


class RLTokenPolicy(BasePolicy):
    """SB3 policy that holds actor, critics, their targets, their optimisers and the normaliser.

    Greedy action: ``mu(x, a~)``, the actor's mean, with ``config.actor_ema`` that of
    ``actor_average``. Exploration noise belongs to the algorithm.

    Attributes:
        actor_average: The running average of the actor's weights; None without ``actor_ema``.
        guarded_tasks: Tasks in which ``predict`` returns the VLA's chunk; see
            :func:`~vla_gym_trainers.td3.train.guard_policy`.
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        action_space: spaces.Box,
        lr_schedule: Schedule,
        config: TD3Config | None = None,
        **base_kwargs: Any,
    ) -> None:
        """Build all networks, of the sizes that ``config`` says; other arguments as SB3's.

        Observed are rl_token (D,), vla_action (C, N), proprio (P,), and perhaps a world model's
        world_memory (S,) and a Discrete task_id; actions are a Box(-1, 1, (C, N)).

        Raises:
            ConfigError: If the spaces do not fit.
        """
        super().__init__(observation_space, action_space, **base_kwargs)
        self.guarded_tasks: tuple[int, ...] = ()
        self.config = config = config or TD3Config()
        chunk_len, action_size = check_spaces(observation_space, action_space)
        scale = torch.tensor(config.scale_of(action_size), dtype=torch.float32)
        self.chunk_scale: Tensor
        self.register_buffer("chunk_scale", scale.repeat(chunk_len))
        self.normalizer = FeatureNormalizer(
            spaces.flatdim(observation_space["rl_token"]),
            spaces.flatdim(observation_space["proprio"]),
            use_token=config.use_rl_token,
            world_memory_dim=world_memory_size(observation_space),
            num_tasks=num_tasks(observation_space) if config.use_task_id else 0,
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
            size = chunk_len * action_size
            return CriticEnsemble(state_dim, size, config.net_arch, config.n_critics, config.bf16)

        self.actor, self.actor_target = actor(), actor()
        self.critic, self.critic_target = critic(), critic()
        self.actor_target.load_state_dict(self.actor.state_dict())
        self.critic_target.load_state_dict(self.critic.state_dict())
        self.actor_target.requires_grad_(False)
        self.critic_target.requires_grad_(False)
        self.actor_average = actor() if config.actor_ema else None
        if self.actor_average is not None:
            self.actor_average.load_state_dict(self.actor.state_dict())
            self.actor_average.requires_grad_(False)
        rate = lr_schedule(1.0)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), rate, fused=True)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), rate, fused=True)

    def predict(
        self, observation: Any, *args: Any, **kwargs: Any
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Return the greedy chunk, in ``guarded_tasks`` the VLA's; see SB3's ``predict``.

        Raises:
            ConfigError: If the policy is told the task, and it is none of those that it knows.
        """
        known = self.normalizer.num_tasks
        if known and np.max(observation["task_id"]) >= known:
            raise ConfigError(
                f"The policy is told which of {known} tasks it plays (use_task_id), and got "
                f"{np.max(observation['task_id'])}: play it in the suite of its training."
            )
        action, state = super().predict(observation, *args, **kwargs)
        if self.guarded_tasks:
            reference = np.asarray(observation["vla_action"], np.float32).reshape(action.shape)
            guarded = np.isin(observation["task_id"], self.guarded_tasks)
            action = np.where(guarded.reshape(-1, 1, 1), reference, action).reshape(action.shape)
        return action, state

    def save(self, path: str | Path) -> None:
        """Write networks, targets, normaliser and guarded tasks; not the optimisers' state.

        The file appears when it is whole; what was there before stays until then.
        """
        observed: Any = self.observation_space
        chunk_len, action_size = self.action_space.shape or ()
        task = observed.spaces.get("task_id")
        header = {
            "format": _FORMAT,
            "token_dim": spaces.flatdim(observed["rl_token"]),
            "proprio_dim": spaces.flatdim(observed["proprio"]),
            "chunk_len": int(chunk_len),
            "action_size": int(action_size),
            "world_memory_dim": world_memory_size(observed),
            "num_tasks": int(task.n) if isinstance(task, spaces.Discrete) else None,
            "guarded_tasks": list(self.guarded_tasks),
            "config": dataclasses.asdict(self.config),
        }
        save_parameters(Path(path), self.state_dict(), {_HEADER: json.dumps(header)})

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> RLTokenPolicy:
        """Read what :meth:`save` wrote, to play; nothing in the file is executed.

        No parameter has a gradient, and the optimisers are of no use.

        Raises:
            WeightsError: If the file is missing, damaged, or no policy of TD3+BC.
        """
        try:
            with safe_open(path, "pt") as file:
                text = (file.metadata() or {}).get(_HEADER)
        except (OSError, SafetensorError) as error:
            why = one_line(error)
            raise WeightsError(f"{path} is missing or damaged: {why}") from error
        if text is None:
            raise WeightsError(
                f"{path} is no policy of TD3+BC: expected the policy.safetensors of a run of "
                "'vla-gym-train td3'."
            )
        header = parse_json(text, _Header, f"{path}: its header", WeightsError)
        config = to_type(header.config, TD3Config, f"{path}: its header", WeightsError)
        with described_by(Path(path)), torch.device("meta"):
            policy = cls._of_header(header, config)
        load_into(policy, Checkpoint(path), device=device, dtype=torch.float32)
        # The file's own memory is not aligned, and sums there are rounded otherwise.
        return copy.deepcopy(policy).eval()

    @classmethod
    def _of_header(cls, header: _Header, config: TD3Config) -> RLTokenPolicy:
        chunk_len, action_size = header.chunk_len, header.action_size
        action = spaces.Box(-1.0, 1.0, (chunk_len, action_size), np.float32)
        observed: dict[str, spaces.Space[Any]] = {
            "rl_token": spaces.Box(-np.inf, np.inf, (header.token_dim,), np.float32),
            "vla_action": action,
            "proprio": spaces.Box(-np.inf, np.inf, (header.proprio_dim,), np.float32),
        }
        if size := header.world_memory_dim:
            observed[WORLD_MEMORY] = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        if header.num_tasks is not None:
            observed["task_id"] = spaces.Discrete(header.num_tasks)
        policy = cls(spaces.Dict(observed), action, lambda _: config.learning_rate, config)
        policy.guarded_tasks = tuple(header.guarded_tasks)
        return policy

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:  # noqa: ARG002
        """Return the mean chunk, (B, C * N)."""
        assert isinstance(observation, dict)
        actor = self.actor if self.actor_average is None else self.actor_average
        return actor(self.normalizer(observation), reference_chunk(observation))


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


def num_tasks(observation_space: spaces.Space[Any]) -> int:
    """Return how many tasks ``task_id`` tells apart.

    Raises:
        ConfigError: If it is not observed.
    """
    tasks = getattr(observation_space, "spaces", {}).get("task_id")
    if not isinstance(tasks, spaces.Discrete):
        raise ConfigError(
            "use_task_id and task_sampling 'unsolved' need to know an episode's task: take "
            "environments that observe task_id, as LiberoVLA-*, or leave them out."
        )
    return int(tasks.n)
