"""The chunks of a rollout that a loss needs, split into minibatches of all processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from vla_gym.vla.preprocess import CAMERAS
from vla_gym_trainers.on_policy.distributed import World
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.settings import Weights


def gather(
    rollout: Rollout,
    advantages: Tensor,
    keep: Tensor,
    returns: Tensor | None,
    weights: Weights,
    *,
    held: bool = False,
) -> TensorDict:
    """Return the chunks (n,) that any loss needs, one after another, without their frames.

    New keys: ``row`` and ``slot`` (where a chunk lies), ``advantages``, ``returns``, ``mask``
    (C, 7) of executed tokens, ``rl`` (the surrogate loss counts this chunk), ``valued`` (the value
    loss does), ``held`` (the KL to the reference does).

    Args:
        rollout: What was played.
        advantages: [rows, chunks].
        keep: [rows, chunks] bool: chunks to learn from by reinforcement.
        returns: [rows, chunks], or None without a value head.
        weights: What takes part.
        held: Whether there is a KL penalty. It counts all chunks of the student, also of groups
            without contrast: nothing else corrects what learning from other tasks does to them.
    """
    data = rollout.data
    valid = data["valid"]
    small = data.exclude(*CAMERAS, "query")
    student = valid & ~data["by_teacher"] & weights.rl
    small["rl"], small["held"] = student & keep, student & held
    small["valued"] = valid & (weights.value and returns is not None)
    small["advantages"] = advantages
    small["returns"] = torch.zeros_like(advantages) if returns is None else returns
    small["mask"] = data["token_mask"][..., None].expand(data["tokens"].shape)
    needed = small["rl"] | small["held"] | small["valued"] | (valid & (weights.cloning > 0.0))
    rows, slots = needed.nonzero(as_tuple=True)
    batch = small[rows, slots]
    batch["row"], batch["slot"] = rows, slots
    return batch


def split(size: int, parts: int, world: World, rng: np.random.Generator) -> list[np.ndarray]:
    """Split the chunks of all processes at random; return which of its own a process has in each.

    The chunks of process 0 come first, then those of process 1: as in one process that plays all
    the environments. All processes draw the same permutation, so a minibatch holds the same chunks
    however many processes share them.

    Args:
        size: Chunks of this process.
        parts: Number of minibatches.
        world: The processes.
        rng: In the same state in all of them.
    """
    sizes = np.zeros(world.size)
    sizes[world.rank] = size
    counts = world.sum(sizes.tolist()).long().tolist()
    first = sum(counts[: world.rank])
    order = rng.permutation(sum(counts))
    own = [part - first for part in np.array_split(order, parts)]
    return [part[(part >= 0) & (part < size)] for part in own]


def micro_batches(chunks: TensorDict, size: int) -> Iterator[TensorDict]:
    """Yield the chunks in pieces of at most ``size``."""
    # Task by task, so that nearly all pieces have one instruction and need no padding.
    chunks = chunks[chunks["instruction"].argsort(stable=True)]
    for first in range(0, len(chunks), size):
        yield chunks[first : first + size]


def inputs_of(rollout: Rollout, chunks: TensorDict) -> tuple[Any, list[str], np.ndarray]:
    """Return what the VLA sees of chunks (n,): frames, instructions, proprio."""
    where = chunks["row"], chunks["slot"]
    frames = {camera: rollout.data[camera][where].numpy() for camera in CAMERAS}
    return frames, rollout.texts(chunks["instruction"]), chunks["proprio"].numpy()
