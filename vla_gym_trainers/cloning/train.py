"""Behaviour cloning of the embedded VLA: ``vla-gym-train mini``."""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from vla_gym.suites import SUITES, suite_tasks
from vla_gym.vla.mini import MiniBackend, MiniVLA, MiniVLAConfig, load_model
from vla_gym.vla.paraphrases import paraphrases
from vla_gym.vla.tokens import WordTokenizer, build_vocabulary
from vla_gym_trainers.cloning.config import MiniConfig
from vla_gym_trainers.cloning.data import DemoSet, load_demos
from vla_gym_trainers.cloning.run import CloningRun
from vla_gym_trainers.cloning.step import cloning_loss, train_step, use_bf16, validate
from vla_gym_trainers.runs.sentences import Sentences

__all__ = ["MiniConfig", "cloning_loss", "train_mini"]
logger = logging.getLogger(__name__)


def build_model(config: MiniConfig, demos: DemoSet) -> MiniVLA:
    """Make the network: fresh, from ``config.init_from``, or for the checkpoint to resume.

    The last two keep their vocabulary and their normalisation, whatever the demonstrations are.
    """
    if config.resume:
        return load_model(Path(config.output) / "model")
    if config.init_from is not None:
        from vla_gym.vla.files import resolve_weights

        return load_model(resolve_weights(config.init_from))
    train = demos.proprio[demos.train]
    # The floor keeps noise on nearly constant features from being blown up.
    std = np.maximum(train.std(0), 0.02)
    # All suites' words: the checkpoint can then be trained on with more tasks.
    texts = [*demos.instructions, *(t.instruction for s in SUITES for t in suite_tasks(s))]
    texts += [other for text in texts for other in paraphrases(text)]
    return MiniVLA(
        MiniVLAConfig(
            vocabulary=build_vocabulary(texts),
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            token_head_width=config.token_head_width,
            proprio_mean=[round(float(x), 6) for x in train.mean(0)],
            proprio_std=[round(float(x), 6) for x in std],
        )
    )


def _start(config: MiniConfig, demos: DemoSet) -> CloningRun:
    torch.manual_seed(config.seed)
    model = build_model(config, demos).train()
    torch.nn.Module.to(model, config.device)  # PreTrainedModel.to is typed for other arguments
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(0.9, 0.98),
        fused=True,
    )
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    run = CloningRun(model, ema, optimizer, np.random.default_rng(config.seed))
    if config.resume:
        run.restore(Path(config.output) / "checkpoint.pt")
    return run


def train_mini(config: MiniConfig) -> dict[str, Any]:
    """Clone the demonstrations; return (and write) a summary.

    Raises:
        ConfigError: If the demonstrations are missing or malformed.
        WeightsError: If a checkpoint to start from is unusable.
    """
    torch.set_num_threads(config.threads)
    demos = load_demos(config.demos, config.demos_per_task, config.held_out_episodes)
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n")
    run = _start(config, demos)
    tokenize = WordTokenizer(run.model.config.vocabulary, run.model.config.max_words)
    sentences = Sentences(demos.instructions, tokenize)
    with SummaryWriter(str(output)) as writer:
        _loop(run, demos, sentences, config, writer)
        result: dict[str, Any] = {
            "steps": run.step,
            "minutes": round(run.seconds / 60, 2),
            "frames": len(demos.images),
            "instructions": demos.instructions,
            **validate(run.ema, demos, sentences, config),
        }
        if config.eval_episodes:
            result["closed_loop"] = _evaluate(run, demos, config, writer)
            result |= {"best_step": run.best_step, "best_success_rate": run.best}
        _save(run, output)
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _loop(
    run: CloningRun,
    demos: DemoSet,
    sentences: Sentences,
    config: MiniConfig,
    writer: SummaryWriter,
) -> None:
    """Take steps until the time or the number of steps is used up."""
    bf16 = use_bf16(config.precision, config.device)
    minutes, output = config.minutes, Path(config.output)
    total = minutes * 60 if minutes is not None else float(config.steps or 0)
    next_save = run.seconds + config.save_minutes * 60
    logger.info("%d frames of %d tasks", len(demos.images), len(demos.instructions))
    losses: list[tuple[float, float]] = []
    bar = tqdm(total=round(total), unit="s" if minutes is not None else "it", desc="mini")
    while True:
        used = run.seconds if minutes is not None else float(run.step)
        bar.update(min(int(used), round(total)) - bar.n)
        if used >= total:
            break
        rate = _set_learning_rate(run, config, used / total)
        began = time.monotonic()
        losses.append(train_step(run, demos, sentences, config, bf16))
        run.seconds += time.monotonic() - began
        if run.step % 50 == 0:
            l1, entropy = np.mean(losses, axis=0)
            losses.clear()
            bar.set_postfix(step=run.step, l1=f"{l1:.4f}", ce=f"{entropy:.3f}", refresh=False)
            speed = run.step * config.batch_size / run.seconds
            for key, value in (
                ("train/l1", l1),
                ("train/token_cross_entropy", entropy),
                ("train/learning_rate", rate),
                ("time/samples_per_s", speed),
            ):
                writer.add_scalar(key, value, run.step)
        if run.seconds >= next_save:
            next_save = run.seconds + config.save_minutes * 60
            _save(run, output)
            for key, value in validate(run.ema, demos, sentences, config).items():
                writer.add_scalar(key, value, run.step)
        if config.eval_every and config.eval_episodes and run.step % config.eval_every == 0:
            if run.step != config.steps:  # the end has an evaluation of its own
                _evaluate(run, demos, config, writer)
                _save(run, output)
    bar.close()


def _set_learning_rate(run: CloningRun, config: MiniConfig, progress: float) -> float:
    """Follow a cosine over the run after 100 steps of warm-up; return the rate."""
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    rate = config.learning_rate * min(1.0, (run.step + 1) / 100) * (0.02 + 0.98 * cosine)
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    return rate


def _evaluate(
    run: CloningRun, demos: DemoSet, config: MiniConfig, writer: SummaryWriter
) -> dict[str, dict[str, float]]:
    """Play sampled layouts with the averaged weights; keep them in best/ if none were better."""
    from vla_gym_trainers.rl_token.vla_rollout import evaluate_sampled, tasks_of_instructions

    vla = MiniBackend(copy.deepcopy(run.ema), "mini")
    tasks = tasks_of_instructions(demos.instructions)
    table = evaluate_sampled(vla, tasks, config.eval_episodes, seed=10_000 + config.seed)
    rates = {key: row["successes"] / row["episodes"] for key, row in table.items()}
    mean = float(np.mean(list(rates.values())))
    writer.add_scalar("eval/success_rate", mean, run.step)
    for suite in dict.fromkeys(key.split("/")[0] for key in rates):
        own = [rate for key, rate in rates.items() if key.split("/")[0] == suite]
        writer.add_scalar(f"eval/success_rate_{suite}", float(np.mean(own)), run.step)
    logger.info("step %d: success rate %.3f on sampled layouts", run.step, mean)
    if mean >= run.best:
        run.best, run.best_step = mean, run.step
        run.ema.save_half(Path(config.output) / "best")
    return table


def _save(run: CloningRun, output: Path) -> None:
    run.save(output / "checkpoint.pt")
    run.ema.save_half(output / "model")
