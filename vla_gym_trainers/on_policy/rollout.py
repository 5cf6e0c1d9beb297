"""What a rollout holds: a TensorDict [rows, chunks] in memory that is taken once and used again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from tensordict import TensorDict

from vla_gym.errors import ConfigError

#: Shape of one row and dtype.
ArraySpec = tuple[tuple[int, ...], torch.dtype]


class Played(Protocol):
    """What of a policy (see ``policy.Policy``) decides what a rollout stores."""

    observation: dict[str, ArraySpec]
    sample: ArraySpec
    factors: tuple[int, ...]
    value_size: int

    @property
    def needs_values(self) -> bool:
        """Whether there is a value head."""


@dataclass(frozen=True)
class RolloutShape:
    """Sizes of a rollout.

    Attributes:
        num_envs: Environments N.
        num_chunks: Slots T of a row.
        episodes: Whole episodes an environment, each a row of its own; None: one row an
            environment, filled to its end with one episode after another.
        observation: What is stored of an observation: shape and dtype by name.
        act: What is stored of what a policy does there, by the names of ``policy.Act``.
        group_size: So many consecutive environments play the same layouts.
        first_env: Number of environment 0 among those of all processes.
    """

    num_envs: int
    num_chunks: int
    episodes: int | None
    observation: Mapping[str, ArraySpec]
    act: Mapping[str, ArraySpec]
    group_size: int = 1
    first_env: int = 0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a size is not positive.
        """
        sizes = (self.num_envs, self.num_chunks, self.group_size)
        if min(*sizes, 1 if self.episodes is None else self.episodes) < 1:
            raise ConfigError(f"Sizes of a rollout must be positive, got {self}.")

    @classmethod
    def of(
        cls,
        policy: Played,
        num_envs: int,
        num_chunks: int,
        episodes: int | None,
        *,
        group_size: int = 1,
        first_env: int = 0,
    ) -> RolloutShape:
        """Return the shape of rollouts of a policy; for the other arguments see the class."""
        act: dict[str, ArraySpec] = {
            "sample": policy.sample,
            "teacher_sample": policy.sample,
            "log_probs": (policy.factors, torch.float32),
            "values": ((), torch.float32),
            "by_teacher": ((), torch.bool),
        }
        if policy.needs_values:
            act["value_input"] = (policy.value_size,), torch.float32
        return cls(num_envs, num_chunks, episodes, policy.observation, act, group_size, first_env)

    @property
    def rows(self) -> int:
        """Rows: environment i's episode k is row ``i * episodes + k``."""
        return self.num_envs * (self.episodes or 1)


#: What is stored of a chunk whatever the policy.
_RESULTS: dict[str, torch.dtype] = {
    **dict.fromkeys(("next_values", "rewards", "discounts"), torch.float32),
    **dict.fromkeys(("terminated", "truncated", "valid"), torch.bool),
    **dict.fromkeys(("instruction", "executed", "group"), torch.int64),
}


@dataclass
class Rollout:
    """Transitions of N environments; one slot is one chunk.

    Attributes:
        shape: Its sizes.
        data: [rows, chunks] TensorDict on the CPU:
            what the shape says is stored of an observation, e.g. frames, ``proprio``, ``task_id``;
            ``sample``: what was played, ``log_probs``: of its factors by the policy that acted;
            ``teacher_sample``; ``by_teacher``: bool, the teacher's chunk was played;
            ``values``; ``value_input``: what the value head saw, if there is one;
            ``next_values``, ``rewards``, ``discounts`` (gamma ** executed): float32;
            ``executed``: control steps; ``terminated``, ``truncated``: bool;
            ``valid``: bool, False where nothing was played, the worker died over it, or a number
            was not finite;
            ``instruction``: index into ``instructions``;
            ``group``: int64, equal numbers began in the same state.
        instructions: Texts.
        seconds: Wall-clock seconds by purpose.
    """

    shape: RolloutShape
    data: TensorDict
    instructions: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def empty(cls, shape: RolloutShape) -> Rollout:
        """Take the memory; pages that are never written cost nothing."""
        size = (shape.rows, shape.num_chunks)
        specs = {**shape.observation, **shape.act}
        specs |= {name: ((), dtype) for name, dtype in _RESULTS.items()}

        def zeros(inner: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            # calloc'd by NumPy: torch's zeros would touch every page.
            array = np.zeros((*size, *inner), torch.empty((), dtype=dtype).numpy().dtype)
            return torch.from_numpy(array)

        data = {name: zeros(*spec) for name, spec in specs.items()}
        rollout = cls(shape, TensorDict(data, batch_size=size))
        rollout.clear()
        return rollout

    def clear(self) -> None:
        """Make ready for new data; large arrays are overwritten later."""
        for key in ("valid", "terminated", "truncated", "by_teacher"):
            self.data[key].zero_()
        for key in ("rewards", "values", "next_values", "executed", "log_probs"):
            self.data[key].zero_()
        self.data["discounts"].fill_(1.0)
        shape, episodes = self.shape, self.shape.episodes or 1
        rows = torch.arange(shape.rows)
        env, episode = rows // episodes + shape.first_env, rows % episodes
        group = env // shape.group_size * episodes + episode
        self.data["group"].copy_(group[:, None].expand(shape.rows, shape.num_chunks))
        # Numbered anew, so that nothing depends on what was played before.
        self.instructions, self.seconds = [], {}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The same memory as NumPy arrays."""
        return {str(key): np.asarray(value) for key, value in self.data.items()}

    @property
    def ended(self) -> torch.Tensor:
        """[rows, chunks] bool: the episode ended with this chunk."""
        return self.data["valid"] & (self.data["terminated"] | self.data["truncated"])

    def inputs(self, chunks: TensorDict) -> tuple[dict[str, np.ndarray], list[str]]:
        """Return observations and instructions of chunks (n,) that have ``row`` and ``slot``."""
        where = chunks["row"], chunks["slot"]
        observation = {key: self.data[key][where].numpy() for key in self.shape.observation}
        return observation, self.texts(chunks["instruction"])

    def instruction_id(self, text: str) -> int:
        """Return the index of an instruction, a new one if need be."""
        if text not in self.instructions:
            self.instructions.append(text)
        return self.instructions.index(text)

    def texts(self, ids: torch.Tensor) -> list[str]:
        """Return the instructions with these indices (n,)."""
        return [self.instructions[i] for i in ids.tolist()]
