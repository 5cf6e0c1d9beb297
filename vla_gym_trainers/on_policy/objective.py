"""The losses of a micro-batch of chunks, added up."""

from __future__ import annotations

from typing import NamedTuple

from tensordict import TensorDict
from torch import Tensor

from vla_gym_trainers.on_policy import losses
from vla_gym_trainers.on_policy.minibatches import inputs_of
from vla_gym_trainers.on_policy.policy import TokenPolicy
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.settings import LearnerSettings, Weights


class Counts(NamedTuple):
    """What the losses of one minibatch of all processes are divided by."""

    tokens: float
    ratios: float
    held: float
    valued: float
    cloned: float


#: Losses, each with the count that it is divided by.
LOSSES = {
    "policy_loss": "ratios",
    "entropy": "tokens",
    "reference_kl": "held",
    "value_loss": "valued",
    "cloning_loss": "cloned",
}
#: What is added up over micro-batches: the losses, and plain sums.
SUMS = (*LOSSES, "clipped", "kl", "ratio_deviation", "right")


def objective(
    policy: TokenPolicy,
    settings: LearnerSettings,
    rollout: Rollout,
    micro: TensorDict,
    counts: Counts,
    weights: Weights,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what is minimised on a micro-batch, as a share of its minibatch.

    Args:
        policy: What is trained.
        settings: Coefficients and clips.
        rollout: Holds the frames.
        micro: Chunks (n,), as :func:`~vla_gym_trainers.on_policy.minibatches.gather` returns them;
            if some are held, with ``reference``: (n, C, 7) log-probabilities of the reference.
        counts: Of the whole minibatch.
        weights: What takes part.

    Returns:
        The loss (), without a gradient if nothing takes part, and what of :data:`SUMS` there is,
        detached.
    """
    device = next(policy.vla.model.parameters()).device
    inputs = inputs_of(rollout, micro)
    tokens = micro["tokens"].long().to(device)
    teacher = None
    if weights.cloning > 0.0:
        teacher = micro["teacher_tokens"].long().to(device)
    seen = policy.evaluate(*inputs, tokens, teacher)
    names = ["mask", "rl", "held", "valued", "log_probs", "advantages", "returns", "values"]
    small = micro.select(*names, "reference", strict=False).to(device)
    mask = small["mask"]
    rl = mask & small["rl"][:, None, None]
    loss = seen.log_probs.new_zeros(())
    parts: dict[str, Tensor] = {}
    if counts.tokens > 0.0:
        ratio = losses.token_ratio(
            seen.log_probs,
            small["log_probs"],
            rl,
            settings.ratio_level,
            settings.log_ratio_clamp,
        )
        clip = settings.clip_low, settings.clip_high
        surrogate = losses.ppo_loss(ratio, small["advantages"], counts.ratios, *clip)
        entropy = losses.masked_mean(seen.entropy, rl, counts.tokens)
        loss = loss + surrogate.loss - settings.entropy_coef * entropy
        deviation = (ratio.log_ratio.detach().exp() - 1.0).abs() * ratio.mask
        parts |= {
            "policy_loss": surrogate.loss,
            "entropy": entropy,
            "clipped": surrogate.clipped,
            "kl": surrogate.kl,
            "ratio_deviation": deviation.sum(),
        }
    if counts.held > 0.0:
        held = mask & small["held"][:, None, None]
        there, clamp = small["reference"], settings.log_ratio_clamp
        kl = losses.reference_kl(seen.log_probs, there, held, counts.held, clamp)
        loss, parts["reference_kl"] = loss + settings.kl_coef * kl, kl
    if counts.valued > 0.0:
        keep = small["valued"]
        value = losses.value_loss(
            seen.values[keep],
            small["values"][keep],
            small["returns"][keep],
            counts.valued,
            settings.value_clip,
        )
        loss, parts["value_loss"] = loss + settings.value_coef * value, value
    if counts.cloned > 0.0:
        assert seen.teacher_log_probs is not None and teacher is not None
        cloning = losses.cloning_loss(seen.teacher_log_probs, mask, counts.cloned)
        loss, parts["cloning_loss"] = loss + weights.cloning * cloning, cloning
        parts["right"] = ((seen.greedy == teacher) & mask).sum()
    return loss, {key: value.detach() for key, value in parts.items()}


def loss_metrics(totals: dict[str, float]) -> dict[str, float]:
    """Return means over all ratios, tokens or chunks of an update."""
    ratios, tokens, cloned = totals["ratios"], totals["tokens"], totals["cloned"]
    metrics = {
        f"train/{key}": totals[key] / totals[count]
        for key, count in LOSSES.items()
        if totals[count] > 0.0
    }
    if ratios > 0.0:
        metrics["train/clip_fraction"] = totals["clipped"] / ratios
        metrics["train/kl"] = totals["kl"] / ratios
        metrics["train/ratio_deviation"] = totals["ratio_deviation"] / ratios
        metrics["train/tokens"] = tokens
    if cloned > 0.0:
        metrics["train/token_accuracy"] = totals["right"] / cloned
    return metrics
