"""What a rollout holds: a TensorDict [rows, chunks] in memory that is taken once and used again."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from tensordict import TensorDict

from vla_gym.errors import ConfigError
from vla_gym.vla.preprocess import CAMERAS

ACTION_DIM, PROPRIO_DIM = 7, 8


@dataclass(frozen=True)
class RolloutShape:
    """Sizes of a rollout.

    Attributes:
        num_envs: Environments N.
        num_chunks: Slots T of a row.
        episodes: Whole episodes an environment, each a row of its own; None: one row an
            environment, filled to its end with one episode after another.
        horizon: Control steps C of a VLA's chunk.
        frame_size: Side of a stored frame in pixels.
        group_size: So many consecutive environments play the same layouts.
        first_env: Number of environment 0 among those of all processes.
        query_size: Numbers of a query that are stored for the value head; 0: none are.
    """

    num_envs: int
    num_chunks: int
    episodes: int | None
    horizon: int
    frame_size: int
    group_size: int = 1
    first_env: int = 0
    query_size: int = 0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a size is not positive.
        """
        sizes = (self.num_envs, self.num_chunks, self.horizon, self.frame_size, self.group_size)
        if min(*sizes, 1 if self.episodes is None else self.episodes) < 1:
            raise ConfigError(f"Sizes of a rollout must be positive, got {self}.")

    @property
    def rows(self) -> int:
        """Rows: environment i's episode k is row ``i * episodes + k``."""
        return self.num_envs * (self.episodes or 1)

    @property
    def num_bytes(self) -> int:
        """Memory of one rollout if every slot is filled."""
        frames = len(CAMERAS) * self.frame_size**2 * 3
        tokens = self.horizon * (ACTION_DIM * (1 + 1 + 4) + 1)
        numbers = 4 * (PROPRIO_DIM + self.query_size)
        return self.rows * self.num_chunks * (frames + tokens + numbers + 64)


@dataclass
class Rollout:
    """Transitions of N environments; one slot is one chunk.

    Attributes:
        shape: Its sizes.
        data: [rows, chunks] TensorDict on the CPU:
            ``agentview``, ``wrist``: (S, S, 3) uint8, what the VLA saw;
            ``proprio``: (8,) float32; ``instruction``: index into ``instructions``; ``task_id``;
            ``tokens``: (C, 7) uint8; ``log_probs``: (C, 7) float32 by the policy that acted;
            ``teacher_tokens``: (C, 7) uint8; ``by_teacher``: bool, the teacher's chunk was played;
            ``token_mask``: (C,) bool, False for control steps that were never executed;
            ``values``, ``next_values``, ``rewards``, ``discounts`` (gamma ** executed): float32;
            ``executed``: control steps; ``terminated``, ``truncated``: bool;
            ``valid``: bool, False where nothing was played or the worker died over it;
            ``query``: (H,) float32, what the value head saw, if the shape says so;
            ``group``: int64, equal numbers began in the same state;
            ``version``: int64, of the parameters that acted.
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
        size, steps = (shape.rows, shape.num_chunks), (shape.horizon, ACTION_DIM)
        frame = (shape.frame_size, shape.frame_size, 3)

        def zeros(*inner: int, dtype: torch.dtype) -> torch.Tensor:
            # calloc'd by NumPy: torch's zeros would touch every page.
            array = np.zeros((*size, *inner), torch.empty((), dtype=dtype).numpy().dtype)
            return torch.from_numpy(array)

        data = {camera: zeros(*frame, dtype=torch.uint8) for camera in CAMERAS}
        data["proprio"] = zeros(PROPRIO_DIM, dtype=torch.float32)
        data |= {key: zeros(*steps, dtype=torch.uint8) for key in ("tokens", "teacher_tokens")}
        data["log_probs"] = zeros(*steps, dtype=torch.float32)
        if shape.query_size:
            data["query"] = zeros(shape.query_size, dtype=torch.float32)
        data["token_mask"] = zeros(shape.horizon, dtype=torch.bool)
        for key in ("values", "next_values", "rewards", "discounts"):
            data[key] = zeros(dtype=torch.float32)
        for key in ("by_teacher", "terminated", "truncated", "valid"):
            data[key] = zeros(dtype=torch.bool)
        for key in ("instruction", "task_id", "executed", "group", "version"):
            data[key] = zeros(dtype=torch.int64)
        rollout = cls(shape, TensorDict(data, batch_size=size))
        rollout.clear(0)
        return rollout

    def clear(self, version: int) -> None:
        """Make ready for new data of these parameters; frames and tokens are overwritten later."""
        for key in ("valid", "terminated", "truncated", "token_mask", "by_teacher"):
            self.data[key].zero_()
        for key in ("rewards", "values", "next_values", "executed", "log_probs"):
            self.data[key].zero_()
        self.data["discounts"].fill_(1.0)
        self.data["version"].fill_(version)
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

    def instruction_id(self, text: str) -> int:
        """Return the index of an instruction, a new one if need be."""
        if text not in self.instructions:
            self.instructions.append(text)
        return self.instructions.index(text)

    def texts(self, ids: torch.Tensor) -> list[str]:
        """Return the instructions with these indices (n,)."""
        return [self.instructions[i] for i in ids.tolist()]
