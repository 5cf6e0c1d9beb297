"""Small run directories and cards for the tests of the report, written by the trainers' writers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vla_gym.rollout import Episode, Start
from vla_gym_trainers.evaluation.summary import compare, summarize
from vla_gym_trainers.on_policy.config import GRPOConfig
from vla_gym_trainers.runs import metrics
from vla_gym_trainers.runs.metrics import RunLogger
from vla_gym_trainers.runs.result_card import (
    machine_facts,
    make_card,
    software_versions,
    write_json,
)
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.td3.config import TD3RunConfig

BEGAN = 1_700_000_000.0
FACTS = {"asset_pack": "lite", "gl_renderer": "llvmpipe", "chunk_len": 8, **machine_facts()}
VLA = {"kind": "vla", "vla": {"name": "mini", "sha256": "0"}, "head": "l1"}
Log = tuple[int, float, Mapping[str, float]]


def write_logs(run: RunDir, logs: Sequence[Log]) -> None:
    """Write (step, seconds after ``BEGAN``, values) through the run's own logger."""
    logger = RunLogger(run.metrics, run.tensorboard)
    with pytest.MonkeyPatch.context() as patch:
        for step, seconds, values in logs:
            clock = SimpleNamespace(time=lambda now=BEGAN + seconds: now)
            patch.setattr(metrics, "time", clock)
            for key, value in values.items():
                logger.record(key, value)
            logger.dump(step)
        logger.close()


def write_card(run: RunDir, config: Any, results: Mapping[str, Any]) -> None:
    """Write the card of a run."""
    kind, seeds = config.algorithm, {"run": config.seed}
    card = make_card(kind, config=config, seeds=seeds, environment=FACTS, results=results)
    write_json(run.card, card)


def episodes(successes: Mapping[int, Sequence[bool]]) -> list[Episode]:
    """Return episodes of 100 steps on tasks of goal."""
    return [
        Episode(Start("goal", task_id, state), won, won, not won, 100)
        for task_id, outcomes in successes.items()
        for state, won in enumerate(outcomes)
    ]


def paired(
    vla: Mapping[int, Sequence[bool]], policy: Mapping[int, Sequence[bool]]
) -> dict[str, Any]:
    """Return a card's results: the final evaluation of a run."""
    before, after = episodes(vla), episodes(policy)
    compared = {"policy": VLA, **compare(after, before)}
    return {
        "evaluation": {
            "start": summarize(before),
            "policy": {**summarize(after), "paired": compared},
        }
    }


def td3_run(
    path: Path,
    evals: Sequence[float],
    *,
    card: bool = True,
    results: Mapping[str, Any] | None = None,
    **settings: Any,
) -> RunDir:
    """Write a run that evaluated every 1000 chunks and 100 seconds."""
    run = RunDir(path)
    config = TD3RunConfig(run_dir=path, eval_every=1000, **settings)
    write_json(run.config, config)
    logs: list[Log] = []
    for i, success in enumerate(evals, 1):
        train = {"train/critic_loss": 1.0 / i, "train/replay_size": 1000 * i}
        clock = {"time/time_elapsed": 100 * i - 10, "time/episodes": 50 * i}
        clock["time/total_env_steps"] = 8 * (1000 * i - 100)
        training = {"rollout/success_rate": success - 0.1}
        logs.append((1000 * i - 100, 100.0 * i - 10, train | clock | training))
        evaluation = {"eval/success": success, "eval/vla_success": 0.25}
        logs.append((1000 * i, 100.0 * i, evaluation))
    write_logs(run, logs)
    if card:
        steps = 1000 * len(evals)
        training_facts = {"chunks": steps, "env_steps": 8 * steps, "minutes": 5.0, "episodes": 200}
        write_card(run, config, {"training": training_facts, **(results or {})})
    return run


def against_vla() -> dict[str, Any]:
    """Task 9: 10 of 10 against 4 of 10; task 8: 5 of 10 against 6 of 10."""
    vla = {9: [i < 4 for i in range(10)], 8: [i < 6 for i in range(10)]}
    return paired(vla, {9: [True] * 10, 8: [i < 5 for i in range(10)]})


def grpo_run(path: Path, **settings: Any) -> RunDir:
    """Write a run of two rollouts of 500 control steps, 80 seconds each and 40 for the rest."""
    run = RunDir(path)
    config = GRPOConfig(run_dir=path, **settings)
    write_json(run.config, config)
    logs: list[Log] = [(0, 20.0, {"eval/success": 0.5, "eval/teacher_success": 0.75})]
    for i in (1, 2):
        rollout = {"rollout/success": 0.25 * i, "rollout/episodes": 16.0}
        times = {"time/rollout": 60.0, "time/forward": 24.0, "time/learn": 20.0, "time/wait": 60.0}
        row = rollout | times | {"time/seconds": 100.0 * i, "train/kl": 0.01 * i}
        logs.append((500 * i, 100.0 * i, row))
    write_logs(run, logs)
    training = {"env_steps": 1000, "minutes": 200 / 60, "staleness_chunks": {"0": 30, "1": 10}}
    write_card(run, config, {"training": training})
    return run


def eval_card(
    path: Path,
    successes: Mapping[int, Sequence[bool]],
    *,
    policy: Mapping[str, Any] | None = None,
    paired: Mapping[str, Any] | None = None,
) -> Path:
    """Write a card of ``vla-gym eval`` for tasks of goal; by default it is the VLA's."""
    protocol = {
        "chunk_len": 8,
        "policy": dict(policy or VLA),
        "tasks": {"goal": list(successes)},
        "episodes": len(next(iter(successes.values()))),
        "assets": {"name": "lite", "digest": "d"},
        "physics": "fast",
        "confusion": False,
    }
    results = summarize(episodes(successes))
    if paired is not None:
        results["paired"] = paired
    card = make_card("eval", config={}, seeds={"policy": 0}, environment=FACTS, results=results)
    card |= {"schema": 2, "protocol": protocol, "versions": software_versions()}
    write_json(path / "card.json", card)
    return path
