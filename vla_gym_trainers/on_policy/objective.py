"""The loss of a minibatch: which chunks it has, and which losses are added up over them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from vla_gym_trainers.on_policy import losses
from vla_gym_trainers.on_policy.config import OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.policy import Policy
from vla_gym_trainers.on_policy.rollout import Rollout


class Counts(NamedTuple):
    """What the losses of one minibatch of all processes are divided by."""

    factors: float
    ratios: float
    chunks: float
    held: float
    valued: float
    cloned: float


#: Losses, each with the count that it is divided by.
LOSSES = {
    "policy_loss": "ratios",
    "entropy": "factors",
    "squared_mean": "chunks",
    "reference_kl": "held",
    "value_loss": "valued",
    "cloning_loss": "cloned",
}
#: What is added up over micro-batches: the losses, and plain sums.
SUMS = (*LOSSES, "clipped", "kl", "ratio_deviation", "right")


def gather(
    policy: Policy,
    rollout: Rollout,
    advantages: Tensor,
    keep: Tensor,
    returns: Tensor | None,
    phase: Phase,
    *,
    held: bool = False,
) -> TensorDict:
    """Return the chunks (n,) that any loss needs, one after another, without their observations.

    New keys: ``row`` and ``slot`` (where a chunk lies), ``advantages``, ``returns``, ``mask`` of
    the factors that took part, ``rl`` (the surrogate loss counts this chunk), ``valued`` (the value
    loss does), ``held`` (the KL to the reference does).

    Args:
        policy: The policy that learns.
        rollout: What was played.
        advantages: [rows, chunks].
        keep: [rows, chunks] bool: chunks to learn from by reinforcement.
        returns: [rows, chunks], or None without a value head.
        phase: What takes part.
        held: Whether there is a KL penalty. It counts all chunks of the student, also of groups
            without contrast: nothing else corrects what learning from other tasks does to them.
    """
    data = rollout.data
    valid = data["valid"]
    small = data.exclude(*rollout.shape.observation, "value_input")
    student = valid & ~data["by_teacher"] & phase.rl
    small["rl"], small["held"] = student & keep, student & held
    small["valued"] = valid & (phase.value and returns is not None)
    small["advantages"] = advantages
    small["returns"] = torch.zeros_like(advantages) if returns is None else returns
    needed = small["rl"] | small["held"] | small["valued"] | (valid & (phase.cloning > 0.0))
    rows, slots = needed.nonzero(as_tuple=True)
    batch = small[rows, slots]
    batch["row"], batch["slot"] = rows, slots
    batch["mask"] = policy.factor_mask(batch["executed"])
    return batch


def split(size: int, parts: int, group: ProcessGroup, rng: np.random.Generator) -> list[np.ndarray]:
    """Split the chunks of all processes at random; return which of its own a process has in each.

    The chunks of process 0 come first, then those of process 1: as in one process that plays all
    the environments. All processes draw the same permutation, so a minibatch holds the same chunks
    however many processes share them.

    Args:
        size: Chunks of this process.
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
    """Yield the chunks in pieces of at most ``size``."""
    # Task by task, so that nearly all pieces have one instruction and need no padding.
    chunks = chunks[chunks["instruction"].argsort(stable=True)]
    for first in range(0, len(chunks), size):
        yield chunks[first : first + size]


def objective(
    policy: Policy,
    config: OnPolicyConfig,
    rollout: Rollout,
    micro: TensorDict,
    counts: Counts,
    phase: Phase,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what is minimised on a micro-batch, as a share of its minibatch.

    Args:
        policy: What is trained.
        config: Coefficients and clips.
        rollout: Holds the observations.
        micro: Chunks (n,), as :func:`gather` returns them; if some are held, with ``reference``:
            (n, *factors) log-probabilities of the reference.
        counts: Of the whole minibatch.
        phase: What takes part.

    Returns:
        The loss (), without a gradient if nothing takes part, and what of :data:`SUMS` there is,
        detached.
    """
    device = policy.device
    taught = micro["teacher_sample"].to(device) if phase.cloning > 0.0 else None
    seen = policy.evaluate(*rollout.inputs(micro), micro["sample"].to(device), taught)
    names = ["mask", "rl", "held", "valued", "log_probs", "advantages", "returns", "values"]
    small = micro.select(*names, "reference", strict=False).to(device)
    mask = small["mask"]
    rl = mask & per_factor(small["rl"], mask)
    loss = seen.log_probs.new_zeros(())
    parts: dict[str, Tensor] = {}
    if counts.factors > 0.0:
        ratio = losses.ratio_of(seen.log_probs, small["log_probs"], rl, config.ratio_level)
        clip = config.clip_low, config.clip_high
        surrogate = losses.ppo_loss(ratio, small["advantages"], counts.ratios, *clip)
        entropy = losses.masked_mean(seen.entropy, rl, counts.factors)
        loss = loss + surrogate.loss - config.entropy_coef * entropy
        deviation = (ratio.log_ratio.detach().exp() - 1.0).abs() * ratio.mask
        parts |= {
            "policy_loss": surrogate.loss,
            "entropy": entropy,
            "clipped": surrogate.clipped,
            "kl": surrogate.kl,
            "ratio_deviation": deviation.sum(),
        }
        if seen.squared_mean is not None:
            distance = losses.masked_mean(seen.squared_mean, small["rl"], counts.chunks)
            loss, parts["squared_mean"] = loss + config.bc_weight * distance, distance
    if counts.held > 0.0:
        held = mask & per_factor(small["held"], mask)
        kl = losses.reference_kl(seen.log_probs, small["reference"], held, counts.held)
        loss, parts["reference_kl"] = loss + config.kl_coef * kl, kl
    if counts.valued > 0.0:
        assert isinstance(config, PPOConfig)
        keep = small["valued"]
        value = losses.value_loss(
            seen.values[keep],
            small["values"][keep],
            small["returns"][keep],
            counts.valued,
            config.value_clip,
        )
        loss, parts["value_loss"] = loss + config.value_coef * value, value
    if counts.cloned > 0.0:
        assert seen.teacher_log_probs is not None and taught is not None
        cloning = losses.cloning_loss(seen.teacher_log_probs, mask, counts.cloned)
        loss, parts["cloning_loss"] = loss + phase.cloning * cloning, cloning
        parts["right"] = ((seen.mode == taught) & mask).sum()
    return loss, {key: value.detach() for key, value in parts.items()}


def per_factor(chunks: Tensor, mask: Tensor) -> Tensor:
    """Return (n,) with dimensions of size 1 for the factors of ``mask`` (n, *factors)."""
    return chunks.reshape(-1, *(1,) * (mask.ndim - 1))


def loss_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Return means over all ratios, factors or chunks of an update."""
    ratios, cloned = totals["ratios"], totals["cloned"]
    metrics = {
        f"train/{key}": totals[key] / totals[count]
        for key, count in LOSSES.items()
        if totals[count] > 0.0 and (key != "squared_mean" or totals[key] > 0.0)
    }
    if ratios > 0.0:
        metrics["train/clip_fraction"] = totals["clipped"] / ratios
        metrics["train/kl"] = totals["kl"] / ratios
        metrics["train/ratio_deviation"] = totals["ratio_deviation"] / ratios
    if cloned > 0.0:
        metrics["train/cloning_accuracy"] = totals["right"] / cloned
    return metrics
