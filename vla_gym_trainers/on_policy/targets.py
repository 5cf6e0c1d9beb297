"""From a rollout to advantages, and what there is to say about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy import formulas
from vla_gym_trainers.on_policy.config import Aggregation, GroupBaseline
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.rollout import Rollout


class Targets(NamedTuple):
    """What the learner fits.

    Attributes:
        advantages: [rows, chunks].
        keep: [rows, chunks] bool: chunks of the surrogate loss.
        returns: [rows, chunks] of the value head, or None.
        metrics: About them, over all processes.
    """

    advantages: Tensor
    keep: Tensor
    returns: Tensor | None
    metrics: dict[str, float]


def ppo_targets(rollout: Rollout, gae_lambda: float, group: ProcessGroup | None = None) -> Targets:
    """GAE over chunks, standardised over the student's chunks of all processes.

    An episode that was lost with its worker is cut at the last chunk that is there, which
    bootstraps from the value of the observation after it. ``rollout`` was collected with a value
    head; for ``gae_lambda`` see :func:`~vla_gym_trainers.on_policy.formulas.gae`.
    """
    group, data = group or ProcessGroup(), rollout.data
    keep, values = data["valid"], data["values"]
    advantages, returns = _gae(rollout, values, data["next_values"], gae_lambda)
    student = keep & ~data["by_teacher"]
    sums = group.sum(formulas.moments(advantages, student))
    advantages = formulas.standardize(advantages, student, sums)
    explained = _explained_variance(returns, values, keep, group)
    metrics = _moments(sums) | {"rollout/explained_variance": explained}
    return Targets(advantages, keep, returns, metrics)


def grpo_targets(
    rollout: Rollout,
    group: ProcessGroup | None = None,
    *,
    baseline: GroupBaseline = "mean",
    aggregation: Aggregation = "episodes",
) -> Targets:
    """One advantage for all chunks of an episode, from its return.

    Episodes with a chunk that is not valid before their end, or whose end was lost with a worker,
    do not count. Groups lie within one process.

    Args:
        rollout: Of whole episodes.
        group: The processes.
        baseline: Of the groups: ``"mean"``, or ``"length"``: the mean weighted by executed
            control steps, see :func:`~vla_gym_trainers.on_policy.formulas.group_relative`.
        aggregation: ``"tokens"``: each token of a minibatch weighs the same in its loss (DAPO, Yu
            et al. 2025), so long failures weigh most; ``"episodes"``: each episode does, as in
            Shao et al. 2024, by advantages divided by its control steps, and multiplied by
            their mean over the episodes that are kept.

    Raises:
        ConfigError: If rows are not whole episodes.
    """
    if rollout.episodes is None:
        raise ConfigError("GRPO needs rollouts of whole episodes.")
    group, data = group or ProcessGroup(), rollout.data
    complete = (rollout.ended & data["valid"].cumprod(dim=1).bool()).any(dim=1)
    nothing = torch.zeros_like(data["rewards"])
    _, returns = _gae(rollout, nothing, nothing, 1.0)
    returns, groups = returns[:, 0], data["group"][:, 0]
    steps = torch.where(data["valid"], data["executed"], 0).sum(dim=1)
    lengths = steps if baseline == "length" else None
    advantages, kept_rows = formulas.group_relative(returns, groups, complete, lengths=lengths)
    with_contrast = float(groups[kept_rows].unique().numel())
    kept, contrast, all_groups = group.sum(
        [float(kept_rows.sum()), with_contrast, float(groups[complete].unique().numel())]
    ).tolist()
    if aggregation == "episodes":
        kept_steps = group.sum([float(steps[kept_rows].sum())]).item()
        advantages = advantages * (kept_steps / max(kept, 1.0)) / steps.clamp(min=1)
    advantages = advantages[:, None].expand(data.shape)
    keep = data["valid"] & kept_rows[:, None]
    metrics = _moments(group.sum(formulas.moments(advantages, keep))) | {
        "rollout/episodes_kept": kept,
        "rollout/groups_kept": contrast / max(all_groups, 1.0),
    }
    return Targets(advantages, keep, None, metrics)


def rollout_metrics(
    rollout: Rollout, group: ProcessGroup | None = None, tasks: Sequence[int] = ()
) -> dict[str, float]:
    """Return what a rollout was like, over all processes, which have the same ``tasks``."""
    data = rollout.data
    valid, ended = data["valid"], rollout.ended
    won = ended & data["terminated"]
    length = torch.where(valid, data["executed"], 0).sum()
    sums = [x.sum() for x in (valid, ended, won, valid & data["by_teacher"])]
    by_task = [(x & (data["task_id"] == t)).sum() for t in tasks for x in (ended, won)]
    counts = [float(x) for x in (*sums, length, len(valid), *by_task)]
    group = group or ProcessGroup()
    chunks, episodes, wins, by_teacher, steps, rows, *totals = group.sum(counts).tolist()
    metrics = {
        "rollout/env_steps": steps,
        "rollout/chunks": chunks,
        "rollout/episodes": episodes,
        "rollout/teacher_share": by_teacher / max(chunks, 1.0),
    }
    if episodes:
        metrics["rollout/success"] = wins / episodes
    for task, count, won_of in zip(tasks, totals[::2], totals[1::2], strict=True):
        if count:
            metrics[f"rollout/success_task_{task}"] = won_of / count
    if rollout.episodes is not None:
        metrics["rollout/episodes_lost"] = rows - episodes
    for name, values in sorted(rollout.reward_terms.items()):  # the same in all processes
        total, count = group.sum([sum(values), len(values)]).tolist()
        metrics[name] = total / count
    return metrics


def _gae(
    rollout: Rollout, values: Tensor, next_values: Tensor, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    names = ("rewards", "discounts", "terminated", "truncated", "valid")
    rewards, discounts, terminated, truncated, valid = (rollout.data[name] for name in names)
    return formulas.gae(
        rewards, values, next_values, discounts, terminated, truncated, valid, gae_lambda
    )


def _moments(sums: Tensor) -> dict[str, float]:
    """Return the advantages' mean and deviation, 0 of nothing; see :func:`.formulas.moments`."""
    count, total, squares = sums.tolist()
    mean = total / max(count, 1.0)
    std = max(squares / max(count, 1.0) - mean * mean, 0.0) ** 0.5
    return {"rollout/advantage_mean": mean, "rollout/advantage_std": std}


def _explained_variance(
    returns: Tensor, values: Tensor, mask: Tensor, group: ProcessGroup
) -> float:
    """``1 - Var(G - V) / Var(G)``; 0 if the returns do not vary."""
    parts = [formulas.moments(x, mask) for x in (returns, returns - values)]
    spread = []
    for count, total, squares in (group.sum(part).tolist() for part in parts):
        spread.append(squares - total * total / max(count, 1.0))
    return 1.0 - spread[1] / spread[0] if spread[0] > 1e-12 else 0.0
