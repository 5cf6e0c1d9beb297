"""A guard: tasks in which a policy was worse than the VLA are played by the VLA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vla_gym.errors import ConfigError
from vla_gym_trainers.runs.closed_loop import play_layouts, vla_act

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from vla_gym_trainers.td3.algorithm import TD3BC

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


def guard_policy(model: TD3BC, env: VecEnv, episodes_per_env: int, seed: int) -> Guard:
    """Compare a policy with the VLA on sampled layouts and guard it where it was worse.

    Args:
        model: Its ``guarded_tasks`` are set; what it was guarded in before does not count here.
        env: Environments whose episodes follow from the seed alone.
        episodes_per_env: Episodes of each environment, for each of the two.
        seed: Environment i plays seed + i.

    Raises:
        ConfigError: If the environments did not play the same tasks for both.
    """
    model.guarded_tasks = ()
    vla = play_layouts(env, vla_act, episodes_per_env, seed)
    policy = play_layouts(
        env,
        lambda obs: model.predict(obs, deterministic=True)[0],
        episodes_per_env,
        seed,
    )
    if vla.keys() != policy.keys():
        raise ConfigError(
            f"The VLA played tasks {sorted(vla)}, the policy {sorted(policy)}: the environments "
            "must draw their tasks by seed, environment and episode alone."
        )
    tasks = sorted(vla)
    # A worker's death may have cost one of the two an episode: the last ones are left out.
    counts = {task: min(len(vla[task]), len(policy[task])) for task in tasks}
    guard = Guard(
        counts,
        {task: sum(vla[task][: counts[task]]) for task in tasks},
        {task: sum(policy[task][: counts[task]]) for task in tasks},
    )
    model.guarded_tasks = guard.guarded
    return guard
