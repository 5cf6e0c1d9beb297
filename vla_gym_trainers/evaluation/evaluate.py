"""Evaluation from Python: the same episodes as ``vla-gym eval`` plays, as a table row a task."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.rollout import Episode, Policy, Start, play
from vla_gym.rollout.vla_policy import VLAPolicy
from vla_gym.suites import get_suite
from vla_gym_trainers.evaluation.eval_result import EvalResult


def evaluate(
    policy: Policy | None,
    suite: str,
    task_id: int,
    init_state_ids: Iterable[int] | None = None,
    **settings: Any,
) -> EvalResult:
    """Play a policy greedily on official initial states of one task.

    Args:
        policy: Who acts, e.g. :func:`load_trained <vla_gym_trainers.evaluation.trained>`; None for
            the shipped VLA ``mini``.
        suite: Suite name.
        task_id: Task index.
        init_state_ids: Official states to play; None for all.
        **settings: Of the environments, see :func:`vla_gym.rollout.make_envs`.

    Raises:
        ConfigError: If no state is given.
    """
    found = get_suite(suite)
    states = range(found.num_init_states) if init_state_ids is None else init_state_ids
    starts = [Start(found.name, task_id, int(i)) for i in states]
    if not starts:
        raise ConfigError("init_state_ids is empty: give at least one official state.")
    policy = VLAPolicy("mini") if policy is None else policy
    started = time.perf_counter()
    episodes = list(play(policy, starts, **settings))
    (result,) = results_by_task(episodes, policy, time.perf_counter() - started)
    return result


def results_by_task(
    episodes: Sequence[Episode], policy: Policy, seconds: float
) -> list[EvalResult]:
    """Return one result a task of episodes on official states, in the order of tasks and states.

    Args:
        episodes: In any order.
        policy: Who played them.
        seconds: Wall time of all; a task gets its share by control steps.
    """
    episodes = sorted(episodes, key=lambda episode: episode.start)
    steps = sum(episode.length for episode in episodes)
    distances: dict[int, list[float]] = getattr(policy, "squared_distances", {})
    results = []
    for suite, task_id in dict.fromkeys((e.suite, e.task_id) for e in episodes):
        mine = [e for e in episodes if (e.suite, e.task_id) == (suite, task_id)]
        lengths = tuple(episode.length for episode in mine)
        results.append(
            EvalResult(
                policy=policy.name,
                suite=suite,
                task_id=task_id,
                init_state_ids=tuple(episode.init_state_id for episode in mine),
                successes=tuple(episode.success for episode in mine),
                control_steps=lengths,
                reference_rms=float(np.sqrt(np.mean(distances.get(task_id, [0.0])))),
                seconds=seconds * sum(lengths) / max(1, steps),
            )
        )
    return results


def load_policy(path: Path) -> Any:
    """Load a trained policy from a .zip or a run directory's ``policy.zip``.

    Raises:
        WeightsError: If there is no such file or it cannot be read.
    """
    from vla_gym_trainers.on_policy.rl_token_policy import WEIGHTS, RLTokenActor

    if (path / WEIGHTS).is_file():
        return RLTokenActor.load(path)
    from vla_gym_trainers.td3.algorithm import TD3BC

    file = path / "policy.zip" if path.is_dir() else path
    if not file.is_file():
        raise WeightsError(
            f"No trained policy at {file}: expected a .zip that 'vla-gym-train td3' wrote, or its "
            "run directory."
        )
    try:
        return TD3BC.load(file, device="cpu", custom_objects={"buffer_size": 1})
    except Exception as error:  # zipfile, pickle and torch each raise their own kinds
        raise WeightsError(f"{file} is not a TD3BC checkpoint or is corrupt: {error}") from error
