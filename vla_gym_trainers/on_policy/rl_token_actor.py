"""The network of PPO and GRPO on the RL token: what is saved, and what plays greedily."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import torch
from gymnasium import spaces
from msgspec import Meta
from torch import Tensor, nn

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import ChunkLength, Size, read_json
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.load_weights import described_by, load_into
from vla_gym_trainers.networks import ChunkActor, FeatureNormalizer, reference_chunk
from vla_gym_trainers.rollout.memory import MEMORY, PREVIOUS_ACTION
from vla_gym_trainers.runs.result_card import write_json
from vla_gym_trainers.runs.torch_helpers import save_parameters
from vla_gym_trainers.world_model.protocol import WORLD_MEMORY

WEIGHTS, SIZES = "rl_token_actor.safetensors", "rl_token_actor.json"


#: What a policy with memory is given back: the memory (B, S) and its chunks (B, C, N).
State = tuple[np.ndarray, np.ndarray]


class ActorSizes(msgspec.Struct):
    """What an actor is made by, see ``PPOConfig`` and, for ``action_scale``, ``ActionSpec.scales``.

    A size of 0: there is no such memory.
    """

    token_dim: Size
    chunk_len: ChunkLength
    net_arch: Annotated[list[Size], Meta(max_length=64)]
    residual_scale: float
    residual_basis: Annotated[int, Meta(ge=0, le=1000)]
    proprio_dim: Size
    action_scale: Annotated[list[float], Meta(min_length=1, max_length=1024)]
    memory_size: Annotated[int, Meta(ge=0, le=2**20)] = 0
    world_memory_size: Annotated[int, Meta(ge=0, le=2**20)] = 0


class RLTokenActor(nn.Module):
    """Normaliser, actor and sigma: what is saved of a policy, and what plays greedily.

    With a memory, ``h_t = GRU(h_{t-1}, [x_t, a_{t-1}])`` of the normalised features x and the chunk
    a that was executed before, both h and a zeros at an episode's start; the actor sees x and h.

    Attributes:
        sizes: What it was made by.
        action_space: Of what it plays.
        observation_space: What it looks at.
        guarded_tasks: None: it plays all tasks itself.
        log_std: (N,) logarithm of sigma, per action dimension.
        memory_size: S; 0: no memory.
        gru: The memory's ``nn.GRUCell``, or None.
    """

    gru: nn.GRUCell | None

    def __init__(self, sizes: ActorSizes, sigma: float = 0.05) -> None:
        """Begin at the VLA; ``sigma`` is what all standard deviations begin with."""
        super().__init__()
        self.sizes, num_actions = sizes, len(sizes.action_scale)
        self.action_space = spaces.Box(-1.0, 1.0, (sizes.chunk_len, num_actions), np.float32)
        self.observation_space = spaces.Dict(
            {
                "rl_token": spaces.Box(-np.inf, np.inf, (sizes.token_dim,), np.float32),
                "vla_action": self.action_space,
                "proprio": spaces.Box(-np.inf, np.inf, (sizes.proprio_dim,), np.float32),
            }
        )
        if sizes.world_memory_size:
            world_memory = spaces.Box(-np.inf, np.inf, (sizes.world_memory_size,), np.float32)
            self.observation_space[WORLD_MEMORY] = world_memory
        self.guarded_tasks: tuple[int, ...] = ()
        self.normalizer = FeatureNormalizer(
            sizes.token_dim, sizes.proprio_dim, world_memory_dim=sizes.world_memory_size
        )
        state_dim = self.normalizer.state_dim
        self.actor = ChunkActor(
            state_dim + sizes.memory_size,
            sizes.chunk_len,
            sizes.net_arch,
            sizes.residual_scale * torch.tensor(sizes.action_scale, dtype=torch.float32),
            sizes.residual_basis,
        )
        self.log_std = nn.Parameter(torch.full((num_actions,), math.log(sigma)))
        self.memory_size, self.gru = sizes.memory_size, None
        if self.memory_size:
            seen = state_dim + sizes.chunk_len * num_actions
            self.gru = nn.GRUCell(seen, self.memory_size)

    @property
    def carried(self) -> dict[str, tuple[int, ...]]:
        """Shapes of what is carried from chunk to chunk, as in a state; empty without a memory."""
        if not self.memory_size:
            return {}
        return {MEMORY: (self.memory_size,), PREVIOUS_ACTION: self.action_space.shape}

    def remember(self, observation: dict[str, Tensor]) -> Tensor:
        """Return the memory (B, S) after features; arguments as :meth:`forward`."""
        x = self.normalizer(observation)
        if self.gru is None:
            return x[:, :0]
        seen = torch.cat([x, observation[PREVIOUS_ACTION].flatten(1)], dim=1)
        return self.gru(seen, observation[MEMORY])

    def forward(self, observation: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean corrections (B, K, N) and the memory (B, S) after the features.

        Args:
            observation: ``rl_token`` (B, D), ``proprio`` (B, P) and ``vla_action`` (B, C, N); with
                a world model ``world_memory``, with a memory ``memory`` (B, S) and
                ``previous_action`` (B, C, N) as well.
        """
        memory = self.remember(observation)
        x = torch.cat([self.normalizer(observation), memory], dim=1)
        return self.actor.coefficients(x, reference_chunk(observation)), memory

    def chunk(self, correction: Tensor, reference: Tensor) -> Tensor:
        """Return the chunks (B, C, N) that corrections (B, K, N) make of the VLA's, the same."""
        return self.actor.chunk(correction, reference.flatten(1)).reshape(reference.shape)

    @torch.no_grad()
    def predict(
        self,
        observation: Mapping[str, np.ndarray],
        state: State | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = True,  # noqa: ARG002
    ) -> tuple[np.ndarray, State | None]:
        """Return the mean chunks (B, C, N) in [-1, 1], called as the policies of SB3 are.

        Args:
            observation: As ``LiberoVLA-*`` has it, one row (no leading dimension) or B.
            state: With a memory, what the last call returned for the same B episodes (1 without a
                leading dimension); None where all of them begin. Not used without.
            episode_start: (B,) bool: rows whose state is of another episode and is left out.
            deterministic: Not used: it never draws.

        Returns:
            The chunks, and with a memory the state of the next call, else None.

        Raises:
            ConfigError: If the state does not fit the observation.
        """
        names = (*self.normalizer.inputs, "vla_action")
        tensors = {name: torch.as_tensor(np.asarray(observation[name])) for name in names}
        if single := tensors["proprio"].ndim == 1:
            tensors = {name: tensor[None] for name, tensor in tensors.items()}
        if self.memory_size:
            tensors |= self._carried(state, episode_start, tensors["vla_action"].shape)
        correction, memory = self(tensors)
        chunks = self.chunk(correction, tensors["vla_action"]).numpy()
        after = (memory.numpy(), chunks) if self.memory_size else None
        return (chunks[0] if single else chunks), after

    def _carried(
        self, state: State | None, episode_start: np.ndarray | None, shape: torch.Size
    ) -> dict[str, Tensor]:
        """Return what is carried to observations with VLA chunks of this shape."""
        shapes = (shape[0], self.memory_size), tuple(shape)
        if state is None:
            state = np.zeros(shapes[0], np.float32), np.zeros(shapes[1], np.float32)
        if (found := tuple(np.shape(part) for part in state)) != shapes:
            raise ConfigError(
                f"Expected a state of arrays {shapes[0]} and {shapes[1]}, got {found}: give what "
                "predict() returned for the same episodes, or None."
            )
        goes_on = np.ones(shape[0], bool) if episode_start is None else ~np.asarray(episode_start)
        parts = (torch.as_tensor(np.array(part, np.float32)) for part in state)
        kept = torch.as_tensor(goes_on)
        memory, chunks = (torch.where(kept.view(-1, *[1] * (x.ndim - 1)), x, 0.0) for x in parts)
        return {MEMORY: memory, PREVIOUS_ACTION: chunks}

    def save(self, folder: Path) -> None:
        """Write the weights, and the sizes that :meth:`load` makes it with."""
        save_parameters(folder / WEIGHTS, self.state_dict())
        write_json(folder / SIZES, msgspec.structs.asdict(self.sizes))

    @classmethod
    def load(cls, folder: Path) -> RLTokenActor:
        """Read what :meth:`save` wrote, on the CPU, to play: no parameter has a gradient.

        Raises:
            WeightsError: If a file is missing or damaged, or holds numbers that are not finite.
        """
        sizes = read_json(folder / SIZES, ActorSizes, WeightsError)
        with described_by(folder), torch.device("meta"):
            actor = cls(sizes)
        load_into(actor, Checkpoint(folder / WEIGHTS), dtype=torch.float32)
        return actor.eval()
