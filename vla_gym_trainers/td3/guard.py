"""A guard: tasks in which a policy was worse than the VLA are played by the VLA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vla_gym.rollout import Start

if TYPE_CHECKING:
    from vla_gym_trainers.evaluation.run_player import RunPlayer
    from vla_gym_trainers.td3.policy import RLTokenPolicy

#: Added to a run's seed: layouts that neither training nor the choice of the best policy played.
GUARD_SEED = 1_500_000_000


def guard_policy(
    policy: RLTokenPolicy, player: RunPlayer, starts: Sequence[Start]
) -> dict[str, Any]:
    """Compare a policy with the VLA on the same starts and guard it where it had fewer successes.

    Args:
        policy: Its ``guarded_tasks`` are set; what it was guarded in before does not count here.
        player: Plays both.
        starts: Sampled layouts.

    Returns:
        The guard's part of a result card.
    """
    policy.guarded_tasks = ()
    played = player.play(None, starts), player.play(policy, starts)
    vla, mine = (Counter(e.task_id for e in episodes if e.success) for episodes in played)
    rows = [
        {
            "task_id": task,
            "episodes": count,
            "vla_successes": vla[task],
            "policy_successes": mine[task],
            "plays": "vla" if mine[task] < vla[task] else "policy",
        }
        for task, count in sorted(Counter(start.task_id for start in starts).items())
    ]
    policy.guarded_tasks = tuple(task for task in sorted(vla) if mine[task] < vla[task])
    guarded = list(policy.guarded_tasks)
    return {"num_guarded": len(guarded), "guarded_tasks": guarded, "by_task": rows}
