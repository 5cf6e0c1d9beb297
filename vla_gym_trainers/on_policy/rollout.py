"""What a rollout holds: a TensorDict [rows, chunks] in memory that is taken once and used again."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from tensordict import TensorDict

from vla_gym_trainers.on_policy.policy import ArraySpec, Policy

#: What is stored of a chunk whatever the policy.
_RESULTS: dict[str, torch.dtype] = {
    **dict.fromkeys(("values", "next_values", "rewards", "discounts"), torch.float32),
    **dict.fromkeys(("terminated", "truncated", "valid", "by_teacher"), torch.bool),
    **dict.fromkeys(("instruction", "executed", "group"), torch.int64),
}


class Rollout:
    """Transitions of N environments; one slot is one chunk.

    Attributes:
        num_envs: Environments N.
        num_chunks: Slots of a row.
        episodes: Whole episodes an environment: episode k of environment i is row
            ``i * episodes + k``. None: one row an environment, filled to its end with one episode
            after another.
        first_env: Number of environment 0 among those of all processes.
        observation: Names of what is stored of an observation.
        carried: Shapes of what is carried from chunk to chunk, see ``Policy.carried``.
        data: [rows, chunks] TensorDict on the CPU:
            what the policy stores of an observation, e.g. frames, ``proprio``, ``task_id``, and of
            one with a memory what is carried: ``memory``, the state before the chunk, and
            ``previous_action``;
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
        reward_terms: By metric the values of a term, if a wrapper made the rewards of several.
        seconds: Wall-clock seconds by purpose.
    """

    def __init__(
        self,
        policy: Policy,
        num_envs: int,
        num_chunks: int,
        episodes: int | None,
        *,
        group_size: int = 1,
        first_env: int = 0,
    ) -> None:
        """Take the memory for a policy's rollouts; pages that are never written cost nothing.

        ``group_size`` consecutive environments play the same layouts; for the rest see the class.
        """
        self.num_envs, self.num_chunks, self.episodes = num_envs, num_chunks, episodes
        self.first_env, self.observation = first_env, tuple(policy.observation)
        self.carried = policy.carried
        specs: dict[str, ArraySpec] = {name: ((), dtype) for name, dtype in _RESULTS.items()}
        specs |= {"sample": policy.sample, "teacher_sample": policy.sample}
        specs |= {"log_probs": (policy.factors, torch.float32), **policy.observation}
        if policy.value_head is not None:
            specs["value_input"] = (policy.value_size,), torch.float32
        size = (num_envs * (episodes or 1), num_chunks)
        # calloc'd by NumPy: torch's zeros would touch every page.
        arrays = {
            name: np.zeros((*size, *inner), torch.empty((), dtype=dtype).numpy().dtype)
            for name, (inner, dtype) in specs.items()
        }
        self.data = TensorDict({k: torch.from_numpy(v) for k, v in arrays.items()}, size)
        env, episode = np.divmod(np.arange(size[0]), episodes or 1)
        arrays["group"][:] = ((env + first_env) // group_size * (episodes or 1) + episode)[:, None]
        self.instructions: list[str] = []
        self.seconds: dict[str, float] = {}
        self.clear()

    def clear(self) -> None:
        """Make ready for new data; large arrays are overwritten later."""
        flags = ("valid", "terminated", "truncated", "by_teacher")
        for key in (*flags, "rewards", "values", "next_values", "executed", "log_probs"):
            self.data[key].zero_()
        self.data["discounts"].fill_(1.0)
        # Numbered anew, so that nothing depends on what was played before.
        self.instructions, self.seconds = [], {}
        self.reward_terms: defaultdict[str, list[float]] = defaultdict(list)

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
        observation = {key: self.data[key][where].numpy() for key in self.observation}
        return observation, self.texts(chunks["instruction"])

    def instruction_id(self, text: str) -> int:
        """Return the index of an instruction, a new one if need be."""
        if text not in self.instructions:
            self.instructions.append(text)
        return self.instructions.index(text)

    def texts(self, ids: torch.Tensor) -> list[str]:
        """Return the instructions with these indices (n,)."""
        return [self.instructions[i] for i in ids.tolist()]
