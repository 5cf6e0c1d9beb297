"""The losses of a minibatch and their gradients: exact sums over micro-batches and processes."""

from __future__ import annotations

from tensordict import TensorDict
from torch import Tensor

from vla_gym_trainers.on_policy import formulas
from vla_gym_trainers.on_policy.config import OnPolicyConfig, PPOConfig, RatioLevel
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.formulas import per_factor
from vla_gym_trainers.on_policy.minibatches import micro_batches
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.policy import Policy
from vla_gym_trainers.on_policy.recurrence import recompute, with_memory
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.rollout.memory import MEMORY

#: Losses; each is a sum divided by a count of its own over the minibatch of all processes.
LOSSES = ("policy_loss", "entropy", "reference_kl", "value_loss", "cloning_loss")
#: Sums over the ratios of the policy loss, and over the factors that are cloned.
OF_RATIOS = {"clipped": "clip_fraction", "kl": "kl", "deviation": "ratio_deviation"}
OF_CLONED = {"right": "cloning_accuracy"}
SUMS = (*LOSSES, *OF_RATIOS, *OF_CLONED)


def accumulate(
    policy: Policy,
    config: OnPolicyConfig,
    rollout: Rollout,
    chunks: TensorDict,
    phase: Phase,
    counts: dict[str, float],
) -> dict[str, float]:
    """Run this process's chunks of a minibatch backward, in micro-batches.

    Every loss is a sum divided by the count over all of the minibatch, so what the gradients add up
    to, over micro-batches and processes, is exactly the gradient of the minibatch. ``chunks`` are
    as :func:`~.minibatches.gather` returns them, if some are held with ``reference`` as well, see
    :func:`~.minibatches.refer`, and ``counts`` as :func:`counts_of` does.

    Returns:
        What :data:`SUMS` names, of this process.
    """
    sums = dict.fromkeys(SUMS, 0.0)
    start = rollout.data[MEMORY] if policy.memory_size else None
    if start is not None and config.memory_start == "recomputed":
        start = recompute(policy, rollout.data)
    for micro in micro_batches(chunks, config.micro_batch_size):
        seen, value_input = policy.distribution(*with_memory(policy, rollout, micro, start))
        small = micro.to(policy.device)
        mask, taught = small["mask"], small["teacher_sample"]
        clone = seen.log_prob(taught) if counts["cloning_loss"] > 0.0 else None
        log_probs = seen.log_prob(small["sample"])
        loss = log_probs.new_zeros(())
        parts: dict[str, Tensor] = {}
        if counts["entropy"] > 0.0:
            rl = mask & per_factor(small["rl"], mask)
            level, clamp = config.ratio_level, config.log_ratio_clamp
            ratio = formulas.ratio_of(log_probs, small["log_probs"], rl, level, clamp)
            surrogate = formulas.ppo_loss(
                *ratio,
                small["advantages"],
                counts["policy_loss"],
                config.clip_low,
                config.clip_high,
            )
            entropy = formulas.masked_mean(seen.entropy(), rl, counts["entropy"])
            loss = loss + surrogate.loss - config.entropy_coef * entropy
            parts = {"policy_loss": surrogate.loss, "entropy": entropy}
            parts |= {key: getattr(surrogate, key) for key in OF_RATIOS}
        if counts["reference_kl"] > 0.0:
            held = mask & per_factor(small["held"], mask)
            kl = formulas.reference_kl(log_probs, small["reference"], held, counts["reference_kl"])
            loss, parts["reference_kl"] = loss + config.kl_coef * kl, kl
        if counts["value_loss"] > 0.0:
            assert isinstance(config, PPOConfig)
            values, keep = policy.values_of(value_input, len(micro)), small["valued"]
            value = formulas.value_loss(
                values[keep],
                small["values"][keep],
                small["returns"][keep],
                counts["value_loss"],
                config.value_clip,
            )
            loss, parts["value_loss"] = loss + config.value_coef * value, value
        if clone is not None:
            cloning = -formulas.masked_mean(clone, mask, counts["cloning_loss"])
            loss, parts["cloning_loss"] = loss + phase.cloning * cloning, cloning
            parts["right"] = ((seen.mode() == taught) & mask).sum()
        if loss.requires_grad:
            loss.backward()
        for key, part in parts.items():
            sums[key] += float(part.detach())
    return sums


def counts_of(
    chunks: TensorDict, phase: Phase, level: RatioLevel, group: ProcessGroup
) -> dict[str, float]:
    """Return what each of :data:`LOSSES` is divided by in a minibatch, over all processes."""
    mask = chunks["mask"]
    rl = mask & per_factor(chunks["rl"], mask)
    ratios = rl if level == "factor" else rl.flatten(1).any(dim=1)
    held = mask & per_factor(chunks["held"], mask)
    counted = (ratios, rl, held, chunks["valued"], mask & (phase.cloning > 0.0))
    total = group.sum([float(x.sum()) for x in counted])
    return dict(zip(LOSSES, total.tolist(), strict=True))


def means(totals: dict[str, float], counts: dict[str, float]) -> dict[str, float]:
    """Return means over all ratios, factors or chunks of an update, of what took part."""
    metrics = {f"train/{key}": totals[key] / n for key, n in counts.items() if n > 0.0}
    for names, of in ((OF_RATIOS, "policy_loss"), (OF_CLONED, "cloning_loss")):
        if counts[of] > 0.0:
            metrics |= {f"train/{name}": totals[key] / counts[of] for key, name in names.items()}
    return metrics
