"""Which chunks of a rollout are learnt from, and in which pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.policy import Policy
from vla_gym_trainers.on_policy.recurrence import recompute
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.rollout.memory import MEMORY
from vla_gym_trainers.rollout.sequences import ranges, runs, windows_of


def gather(
    policy: Policy,
    rollout: Rollout,
    advantages: Tensor,
    keep: Tensor,
    returns: Tensor | None,
    phase: Phase,
    *,
    held: bool = False,
    length: int = 1,
) -> TensorDict:
    """Return the chunks (n,) that any loss needs, one after another, without their observations.

    They come in whole windows: further chunks may stand between them, which no loss counts.

    New keys: ``row`` and ``slot`` (where a chunk lies), ``window`` (its number), ``advantages``,
    ``returns``, ``mask`` of the factors that took part, ``rl`` (the surrogate loss counts this
    chunk), ``valued`` (the value loss does), ``held`` (the KL to the reference does).

    Arguments as :meth:`.learner.Learner.update`; ``held`` says whether there is a KL penalty. It
    counts all chunks of the student, also of groups without contrast: nothing else corrects what
    learning from other tasks does to them. ``length`` is that of
    :func:`~vla_gym_trainers.rollout.sequences.windows_of`.
    """
    data = rollout.data
    valid = data["valid"]
    small = data.exclude(*rollout.observation, "value_input")
    student = valid & ~data["by_teacher"] & phase.rl
    small["rl"], small["held"] = student & keep, student & held
    small["valued"] = valid & (phase.value and returns is not None)
    small["advantages"] = advantages
    small["returns"] = torch.zeros_like(advantages) if returns is None else returns
    needed = small["rl"] | small["held"] | small["valued"] | (valid & (phase.cloning > 0.0))
    windows = windows_of(valid, data["terminated"], data["truncated"], length)
    windows = windows[windows.take({"needed": needed})["needed"].any(dim=1)]
    rows, slots = windows.chunks()
    batch = small[rows, slots]
    batch["row"], batch["slot"] = rows, slots
    batch["window"] = torch.arange(len(windows)).repeat_interleave(windows.lengths)
    batch["mask"] = policy.factor_mask(batch["executed"])
    return batch


def minibatches(
    batch: TensorDict, parts: int, group: ProcessGroup, rng: np.random.Generator
) -> Iterator[TensorDict]:
    """Yield this process's share of minibatches of whole windows; arguments as :func:`split`."""
    first, lengths = runs(batch["window"])
    for part in map(torch.from_numpy, split(len(lengths), parts, group, rng)):
        yield batch[ranges(first[part], lengths[part])]


def split(size: int, parts: int, group: ProcessGroup, rng: np.random.Generator) -> list[np.ndarray]:
    """Split the windows of all processes at random; return which of its own a process has in each.

    The windows of process 0 come first, then those of process 1: as in one process that plays all
    the environments. All processes draw the same permutation, so a minibatch holds the same ones
    however many processes share them.

    Args:
        size: Windows of this process.
        parts: Number of minibatches.
        group: The processes.
        rng: In the same state in all of them.
    """
    sizes = np.zeros(group.size)
    sizes[group.rank] = size
    counts = group.sum(sizes.tolist()).long().tolist()
    first = sum(counts[: group.rank])
    order = rng.permutation(sum(counts))
    own = [part - first for part in np.array_split(order, parts)]
    return [part[(part >= 0) & (part < size)] for part in own]


def micro_batches(chunks: TensorDict, size: int) -> Iterator[TensorDict]:
    """Yield the chunks in pieces of whole windows, of at most ``size`` chunks if a window fits."""
    # Task by task, so that nearly all pieces have one instruction and need no padding.
    chunks = chunks[chunks["instruction"].argsort(stable=True)]
    ends = torch.stack(runs(chunks["window"])).sum(dim=0).tolist()
    first = 0
    for end, following in itertools.pairwise([*ends, math.inf]):
        if following - first > size:
            yield chunks[first:end]
            first = end


@torch.no_grad()
def refer(reference: Policy, rollout: Rollout, chunks: TensorDict, size: int) -> Tensor:
    """Return a reference's log-probabilities: it never changes, so once for all passes.

    It remembers what it saw itself of the episodes, not what the policy that acted did. At most
    ``size`` of the chunks, as :func:`gather` returns them, are in memory at once.

    Returns:
        (n, *factors) float32, 0 where a chunk is not held.
    """
    found = torch.zeros_like(chunks["log_probs"])
    chunks = chunks.select("held", "instruction", "window", "row", "slot", "sample")
    chunks["at"] = torch.arange(len(chunks))
    memory = recompute(reference, rollout.data) if reference.memory_size else None
    for part in micro_batches(chunks[chunks["held"]], size):
        observation, texts = rollout.inputs(part)
        if memory is not None:
            observation[MEMORY] = memory[part["row"], part["slot"]].numpy()
        distribution, _ = reference.distribution(observation, texts)
        sample = part["sample"].to(reference.device)
        found[part["at"]] = distribution.log_prob(sample).cpu()
    return found
