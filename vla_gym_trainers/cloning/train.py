"""Behaviour cloning of the embedded VLA: ``vla-gym-train mini``."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from vla_gym.assets import resolve_asset_pack
from vla_gym.errors import ConfigError
from vla_gym.rollout import Start, play
from vla_gym.rollout.vla_policy import VLAPolicy
from vla_gym.suites import SUITES, Task, suite_tasks
from vla_gym.vla import check_device
from vla_gym.vla.files import resolve_weights, write_checkpoint
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym.vla.mini.model import MiniVLA, MiniVLAConfig, load_model
from vla_gym.vla.paraphrases import paraphrases
from vla_gym.vla.tokens import WordTokenizer, build_vocabulary
from vla_gym_trainers.cloning.config import MiniConfig
from vla_gym_trainers.cloning.data import DemoSet, Sentences, load_demos
from vla_gym_trainers.cloning.state import CloningState
from vla_gym_trainers.cloning.step import train_step, validate
from vla_gym_trainers.evaluation.summary import by_task, counts
from vla_gym_trainers.runs.result_card import machine_facts
from vla_gym_trainers.runs.run import Run
from vla_gym_trainers.runs.torch_helpers import fast_bf16, set_cosine_rate

logger = logging.getLogger(__name__)

LOG_EVERY = 50  # steps


def main(config: MiniConfig) -> str:
    """Run ``vla-gym-train mini``; return what is printed."""
    results = train_mini(config)
    figures = ", ".join(f"{k} {v:.4f}" for k, v in results.items() if isinstance(v, float))
    return f"{results['steps']} steps: {figures}"


def build_model(config: MiniConfig, demos: DemoSet) -> MiniVLA:
    """Make the network: fresh, or from ``config.init_from`` with its vocabulary and scales."""
    if config.init_from is not None:
        model = load_model(resolve_weights(config.init_from))
        for name in ("hidden_size", "num_layers", "flow_layers"):
            given, own = getattr(config, name), getattr(model.config, name)
            if given not in (getattr(MiniConfig, name), own):
                raise ConfigError(
                    f"{config.init_from} has {name}={own}, not {given}: leave {name} or init_from "
                    "out."
                )
        return model
    train, actions = demos.proprio[demos.train], demos.actions[demos.train]
    # The floor keeps noise on nearly constant numbers from being blown up.
    std, action_std = (np.maximum(values.std(0), 0.02) for values in (train, actions))
    # All suites' words: the checkpoint can then be trained on with more tasks.
    texts = [*demos.instructions, *(t.instruction for s in SUITES for t in suite_tasks(s))]
    texts += [other for text in texts for other in paraphrases(text)]
    return MiniVLA(
        MiniVLAConfig(
            vocabulary=build_vocabulary(texts),
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            flow_layers=config.flow_layers,
            action_mean=[round(float(x), 6) for x in actions.mean(0)],
            action_std=[round(float(x), 6) for x in action_std],
            proprio_mean=[round(float(x), 6) for x in train.mean(0)],
            proprio_std=[round(float(x), 6) for x in std],
        )
    )


def train_mini(config: MiniConfig) -> dict[str, Any]:
    """Clone the demonstrations; return the results of the card that is written.

    Raises:
        ConfigError: If the demonstrations are missing or malformed, or nothing can be evaluated.
        WeightsError: If a checkpoint to start from is unusable.
    """
    check_device(config.device)
    torch.set_num_threads(config.threads)
    facts = machine_facts()
    if config.eval_episodes:
        pack = resolve_asset_pack(config.assets)
        facts |= {"asset_pack": pack.name, "asset_pack_digest": pack.digest}
    demos = load_demos(config.demos, config.demos_per_task, config.held_out_episodes)
    if config.eval_episodes and not _known_tasks(demos.instructions):
        raise ConfigError(
            f"eval_episodes={config.eval_episodes} plays LIBERO's tasks, and no instruction in "
            f"{config.demos} is of one: give eval_episodes=0."
        )
    with Run(config, total=config.steps) as run:
        torch.manual_seed(config.seed)
        if run.checkpoint is not None:
            state = CloningState.load(run.checkpoint, config)
            # What lies there may be of later steps, which are dropped.
            state.ema.save_pretrained(run.dir.path / "model")
            if state.best_weights:
                write_checkpoint(
                    run.dir.path / "best", asdict(state.ema.config), state.best_weights
                )
        else:
            state = CloningState.of(build_model(config, demos), config)
        vla = state.model.config
        sentences = Sentences(demos.instructions, WordTokenizer(vla.vocabulary, vla.max_words))
        with run.training():
            _loop(run, state, demos, sentences, config)
        results: dict[str, Any] = {
            "steps": state.step,
            "minutes": round(run.seconds / 60, 2),
            "frames": len(demos.images),
            "instructions": demos.instructions,
            "asset_packs": demos.asset_packs,
            **validate(state.ema, demos, sentences, config),
        }
        if config.eval_episodes:
            if state.evaluated != state.step:
                _evaluate(run, state, demos, config)
                _save(run, state)
            results["closed_loop"] = state.closed_loop
            results |= {"best_step": state.best_step, "best_success_rate": state.best}
        run.write_card(results, facts)
    return results


def _loop(
    run: Run, state: CloningState, demos: DemoSet, sentences: Sentences, config: MiniConfig
) -> None:
    """Take steps until the run is over; leave a checkpoint and ``model/`` behind."""
    auto = config.precision == "auto" and fast_bf16(config.device.split(":")[0])
    bf16 = auto or config.precision == "bf16"
    logger.info("%d frames of %d tasks", len(demos.images), len(demos.instructions))
    losses: list[dict[str, float]] = []
    began = time.perf_counter()
    while not run.is_over(state.step):
        rate = set_cosine_rate(
            state.optimizer, state.step, config.steps, peak=config.learning_rate, warmup=100
        )
        losses.append(train_step(state, demos, sentences, config, bf16))
        run.show(state.step, success=state.best if state.best >= 0.0 else None)
        if state.step % LOG_EVERY == 0:
            means = {f"train/{k}": float(np.mean([x[k] for x in losses])) for k in losses[0]}
            seconds, began = time.perf_counter() - began, time.perf_counter()
            metrics = {
                **means,
                "train/learning_rate": rate,
                "time/samples_per_s": len(losses) * config.batch_size / seconds,
            }
            losses.clear()
            run.log(metrics, state.step)
        is_evaluated = config.eval_every is not None and state.step % config.eval_every == 0
        is_evaluated = is_evaluated and state.step != config.steps  # the end has one of its own
        if is_evaluated:
            _evaluate(run, state, demos, config)
        # A checkpoint knows of each evaluation: a run that goes on must not begin with a worse one.
        if is_evaluated or run.is_checkpoint_due(state.step) or run.is_over(state.step):
            run.log(validate(state.ema, demos, sentences, config), state.step)
            # First: a run that goes on from its last step comes here no more.
            state.ema.save_pretrained(run.dir.path / "model")
            _save(run, state)


def _save(run: Run, state: CloningState) -> None:
    with run.new_checkpoint(state.step, state.plain()) as folder:
        state.save(folder)


def _evaluate(run: Run, state: CloningState, demos: DemoSet, config: MiniConfig) -> None:
    """Play sampled layouts with the averaged weights; keep them in best/ if none were better."""
    vla = MiniBackend(copy.deepcopy(state.ema), "mini")
    state.closed_loop = _play_sampled(vla, _known_tasks(demos.instructions), config)
    state.evaluated = state.step
    rates = {key: row["successes"] / row["episodes"] for key, row in state.closed_loop.items()}
    mean = float(np.mean(list(rates.values())))
    metrics = {"eval/success_rate": mean}
    for suite in dict.fromkeys(key.split("/")[0] for key in rates):
        own = [rate for key, rate in rates.items() if key.split("/")[0] == suite]
        metrics[f"eval/success_rate_{suite}"] = float(np.mean(own))
    run.log(metrics, state.step)
    logger.info("step %d: success rate %.3f on sampled layouts", state.step, mean)
    if mean >= state.best:
        state.best, state.best_step = mean, state.step
        state.best_weights = copy.deepcopy(state.ema.state_dict())
        state.ema.save_pretrained(run.dir.path / "best")


def _known_tasks(instructions: Sequence[str]) -> list[Task]:
    """Return the first task with each instruction that LIBERO knows."""
    known = {task.instruction: task for suite in reversed(SUITES) for task in suite_tasks(suite)}
    return [known[text] for text in instructions if text in known]


def _play_sampled(
    vla: MiniBackend, tasks: Sequence[Task], config: MiniConfig
) -> dict[str, dict[str, float]]:
    """Play sampled layouts of tasks.

    Returns:
        ``{"<suite>/<task_id>": {"successes", "episodes", "mean_steps"}}``; ``mean_steps`` is over
        the successful episodes (0 if there are none).
    """
    count, seed = config.eval_episodes, 10_000 + config.seed
    starts = [Start(task.suite, task.task_id, -1, seed + k) for task in tasks for k in range(count)]
    played = by_task(play(VLAPolicy(vla), starts, assets=config.assets))
    rows = {f"{t.suite}/{t.task_id}": counts(played[t.suite, t.task_id]) for t in tasks}
    return {
        key: {
            "successes": row["num_successes"],
            "episodes": row["num_episodes"],
            "mean_steps": row["mean_success_length"] or 0.0,
        }
        for key, row in rows.items()
    }
