"""A guard: tasks in which a policy was worse than the VLA are played by the VLA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vla_gym.rollout import Episode, Start

if TYPE_CHECKING:
    from vla_gym_trainers.evaluation.run_player import RunPlayer
    from vla_gym_trainers.td3.policy import RLTokenPolicy

#: Added to a run's seed: layouts that neither training nor the choice of the best policy played.
GUARD_SEED = 1_500_000_000


@dataclass(frozen=True)
class Guard:
    """What both did on the same sampled layouts of each task.

    Attributes:
        episodes: Episodes of each of the two, by task.
        vla: Successes of the VLA, by task.
        policy: Successes of the policy, by task.
    """

    episodes: dict[int, int]
    vla: dict[int, int]
    policy: dict[int, int]

    @property
    def guarded(self) -> tuple[int, ...]:
        """Tasks in which the policy had fewer successes: the VLA plays them."""
        return tuple(task for task in self.episodes if self.policy[task] < self.vla[task])

    def report(self) -> dict[str, Any]:
        """Return the guard's part of a result card."""
        rows = [
            {
                "task_id": task,
                "episodes": count,
                "vla_successes": self.vla[task],
                "policy_successes": self.policy[task],
                "plays": "vla" if task in self.guarded else "policy",
            }
            for task, count in self.episodes.items()
        ]
        guarded = self.guarded
        return {"num_guarded": len(guarded), "guarded_tasks": list(guarded), "by_task": rows}


def guard_policy(policy: RLTokenPolicy, player: RunPlayer, starts: Sequence[Start]) -> Guard:
    """Compare a policy with the VLA on the same starts and guard it where it was worse.

    Args:
        policy: Its ``guarded_tasks`` are set; what it was guarded in before does not count here.
        player: Plays both.
        starts: Sampled layouts.
    """
    policy.guarded_tasks = ()
    vla, trained = player.play(None, starts), player.play(policy, starts)

    def successes(episodes: Sequence[Episode]) -> dict[int, int]:
        won = Counter(episode.task_id for episode in episodes if episode.success)
        return {task: won[task] for task in counts}

    counts = dict(sorted(Counter(start.task_id for start in starts).items()))
    guard = Guard(counts, successes(vla), successes(trained))
    policy.guarded_tasks = guard.guarded
    return guard
