"""Results of greedy evaluations: counts, intervals, paired comparisons, a text table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.statistics import PairedComparison, compare_paired, wilson_interval


@dataclass(frozen=True)
class EvalResult:
    """Episodes of one policy on one task.

    Attributes:
        policy: Name of the policy.
        suite: Suite name.
        task_id: Task.
        init_state_ids: Official states, in the order played.
        successes: Success of each.
        control_steps: Length of each episode in control steps.
        reference_rms: Root mean square difference to the VLA's chunks, over all of its numbers.
        seconds: Wall time.
    """

    policy: str
    suite: str
    task_id: int
    init_state_ids: tuple[int, ...]
    successes: tuple[bool, ...]
    control_steps: tuple[int, ...]
    reference_rms: float
    seconds: float

    @property
    def num_successes(self) -> int:
        """Number of successful episodes."""
        return sum(self.successes)

    @property
    def success_rate(self) -> float:
        """Share of successful episodes."""
        return self.num_successes / max(1, len(self.successes))

    def summary(self) -> dict[str, Any]:
        """Return the fields plus rate, Wilson interval and mean length of the successes."""
        lengths = [n for n, ok in zip(self.control_steps, self.successes, strict=True) if ok]
        return {
            "policy": self.policy,
            "suite": self.suite,
            "task_id": self.task_id,
            "num_states": len(self.successes),
            "num_successes": self.num_successes,
            "success_rate": self.success_rate,
            "wilson_95": wilson_interval(self.num_successes, len(self.successes)),
            "mean_success_steps": float(np.mean(lengths)) if lengths else None,
            "reference_rms": self.reference_rms,
            "seconds": round(self.seconds, 2),
            "init_state_ids": self.init_state_ids,
            "successes": self.successes,
            "control_steps": self.control_steps,
        }


def summarize(baseline: Sequence[EvalResult], policy: Sequence[EvalResult] = ()) -> dict[str, Any]:
    """Return the results part of a card: both policies per task, and paired comparisons.

    Args:
        baseline: Results of the VLA, one per task.
        policy: Results of the trained policy on the same tasks and states, or empty.

    Raises:
        ConfigError: If the two do not cover the same states.
    """
    results: dict[str, Any] = {"vla": [result.summary() for result in baseline]}
    if not policy:
        return results
    comparisons = [compare_results(p, b) for p, b in zip(policy, baseline, strict=True)]
    results["policy"] = [result.summary() for result in policy]
    results["paired"] = comparisons
    if len(comparisons) > 1:
        results["paired_all_tasks"] = compare_paired(
            [ok for result in policy for ok in result.successes],
            [ok for result in baseline for ok in result.successes],
        )
    return results


def compare_results(policy: EvalResult, baseline: EvalResult) -> PairedComparison:
    """Compare two results state by state.

    Raises:
        ConfigError: If they are not of the same task and states.
    """
    for key in ("suite", "task_id", "init_state_ids"):
        if getattr(policy, key) != getattr(baseline, key):
            raise ConfigError(
                f"A paired comparison needs the same {key}, got {getattr(policy, key)} and "
                f"{getattr(baseline, key)}."
            )
    return compare_paired(policy.successes, baseline.successes)


def format_table(card: dict[str, Any]) -> str:
    """Return a small text table of an evaluation's results (also of a training card's)."""
    lines = [f"{'task':<10}{'policy':<10}{'success':>10}{'rate':>8}{'95 % interval':>18}"]
    results = card["results"]
    for row in [*results["vla"], *results.get("policy", ())]:
        low, high = row["wilson_95"]
        count = f"{row['num_successes']}/{row['num_states']}"
        task = f"{row['suite']} {row['task_id']}"
        interval = f"{low:.2f} .. {high:.2f}"
        lines.append(
            f"{task:<10}{row['policy']:<10}{count:>10}{row['success_rate']:>8.2f}{interval:>18}"
        )
    for row, paired in zip(results.get("policy", ()), results.get("paired", ()), strict=True):
        if isinstance(paired, PairedComparison):
            wins, losses, p_value = paired.wins, paired.losses, paired.p_value
        else:
            wins, losses, p_value = paired["wins"], paired["losses"], paired["p_value"]
        lines.append(
            f"{row['suite']} {row['task_id']}: policy wins {wins}, loses {losses} states "
            f"(exact sign test p = {p_value:.3g}); rms to the VLA's actions "
            f"{row['reference_rms']:.3f}"
        )
    return "\n".join(lines)
