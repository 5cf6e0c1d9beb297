"""The memory of a recurrent policy while it learns: gradients in windows, and where they start."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from vla_gym_trainers.on_policy.policy import Observation, Policy
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.rollout.memory import MEMORY
from vla_gym_trainers.rollout.sequences import Windows, runs, unroll, windows_of


def with_memory(
    policy: Policy, rollout: Rollout, chunks: TensorDict, start: Tensor | None
) -> tuple[Observation, list[str]]:
    """Return observations and instructions of chunks, with the memory before each of them.

    Args:
        policy: With or without a memory.
        rollout: Holds the observations.
        chunks: (n,) chunks of whole windows, as :func:`~.minibatches.gather` returns them.
        start: [rows, chunks, S], of which what is before the first chunk of a window counts,
            without gradients: what the policy that acted remembered, stale from the first gradient
            step on, or what :func:`recompute` returns. None without a memory.
    """
    observation, texts = rollout.inputs(chunks)
    if start is not None:
        first, lengths = runs(chunks["window"])
        windows = Windows(chunks["row"][first], chunks["slot"][first], lengths)
        memory: Any = _unrolled(policy, rollout.data, windows, start)
        observation[MEMORY] = memory  # a tensor, for the gradients
    return observation, texts


@torch.no_grad()
def recompute(policy: Policy, data: TensorDict) -> Tensor:
    """Return the memory [rows, chunks, S] before each chunk, had the policy acted as it is now.

    An episode that began in an earlier rollout, or that goes on behind a chunk that is not valid,
    starts there from what is stored, which is stale in any case. Where no chunk is valid, what is
    stored stays.
    """
    ends = data["terminated"], data["truncated"]
    episodes = windows_of(data["valid"], *ends, data.shape[1])
    memory = data[MEMORY].clone()
    memory[episodes.chunks()] = _unrolled(policy, data, episodes, memory).cpu()
    return memory


def _unrolled(policy: Policy, data: TensorDict, windows: Windows, start: Tensor) -> Tensor:
    """Return the memory (n, S) before each chunk of windows, in their order."""
    inputs = windows.take({name: data[name] for name in policy.observation if name != MEMORY})

    def step(seen: dict[str, Any], memory: Any) -> Tensor:
        after = policy.remember({**seen, MEMORY: memory})
        assert after is not None
        return after

    first = start[windows.rows, windows.first].to(policy.device)
    mask = windows.mask.to(policy.device)
    return unroll(step, inputs, first)[mask]
