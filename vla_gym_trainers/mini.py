"""Behaviour cloning of the embedded VLA: ``vla-gym-train mini``."""

from __future__ import annotations

import copy
import json
import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from vla_gym.errors import WeightsError
from vla_gym.suites import SUITES, suite_tasks
from vla_gym.vla.mini import GRIPPER, MiniVLA, MiniVLAConfig, load_model, to_pixel_values
from vla_gym.vla.tokens import UNK, WordTokenizer, actions_to_bins, build_vocabulary
from vla_gym_trainers.mini_config import MiniConfig
from vla_gym_trainers.mini_data import DemoSet, drop_words, load_demos, random_shift

__all__ = ["MiniConfig", "train_mini"]
logger = logging.getLogger(__name__)


@dataclass
class _Run:
    """Everything that a checkpoint restores."""

    model: MiniVLA
    ema: MiniVLA
    optimizer: torch.optim.Optimizer
    rng: np.random.Generator
    step: int = 0
    seconds: float = 0.0

    def save(self, path: Path) -> None:
        """Write the checkpoint atomically."""
        state = {
            "model": self.model.state_dict(),
            "ema": self.ema.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.bit_generator.state,
            "step": self.step,
            "seconds": self.seconds,
        }
        torch.save(state, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def restore(self, path: Path) -> None:
        """Read the checkpoint.

        Raises:
            WeightsError: If it is missing, corrupt or of another network.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            self.model.load_state_dict(state["model"])
            self.ema.load_state_dict(state["ema"])
            self.optimizer.load_state_dict(state["optimizer"])
        except Exception as error:  # pickle, zip, key and shape errors alike
            raise WeightsError(f"Cannot resume from {path}: {error}") from error
        self.rng.bit_generator.state = state["rng"]
        self.step, self.seconds = state["step"], state["seconds"]


def cloning_loss(
    actions: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    valid: torch.Tensor,
    config: MiniConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the L1 loss and the token cross-entropy, both without steps after the episode.

    Args:
        actions: (B, C, 7) of the L1 head.
        logits: (B, C, 7, 256) of the token head.
        target: (B, C, 7) expert actions.
        valid: (B, C) bool.
        config: For ``gripper_loss_weight``.
    """
    weight = torch.ones(target.shape[-1], device=target.device)
    weight[GRIPPER] = config.gripper_loss_weight
    mask = valid.float()[..., None]
    count = mask.sum().clamp(min=1.0) * target.shape[-1]
    l1 = ((actions.float() - target).abs() * weight * mask).sum() / count
    entropy = F.cross_entropy(
        logits.float().flatten(0, 2), actions_to_bins(target).flatten(), reduction="none"
    )
    return l1, (entropy.view(target.shape) * mask).sum() / count


def use_bf16(precision: str, device: str) -> bool:
    """Resolve ``precision="auto"``: bf16 on CUDA and on CPUs with the instructions."""
    if precision != "auto":
        return precision == "bf16"
    if device.startswith("cuda"):
        return True
    # Torch before 2.13 cannot tell; float32 is always right, only slower.
    ask = getattr(torch.cpu, "get_capabilities", None)
    capabilities: dict[str, Any] = {} if ask is None else ask()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


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
    return MiniVLA(
        MiniVLAConfig(
            # All suites' words: the checkpoint can then be trained on with more tasks.
            vocabulary=build_vocabulary(
                [*demos.instructions, *(t.instruction for s in SUITES for t in suite_tasks(s))]
            ),
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            proprio_mean=[round(float(x), 6) for x in train.mean(0)],
            proprio_std=[round(float(x), 6) for x in std],
        )
    )


def _start(config: MiniConfig, demos: DemoSet) -> _Run:
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
    run = _Run(model, ema, optimizer, np.random.default_rng(config.seed))
    if config.resume:
        run.restore(Path(config.output) / "checkpoint.pt")
    return run


def _train_step(
    run: _Run, demos: DemoSet, words: torch.Tensor, config: MiniConfig, bf16: bool
) -> tuple[float, float]:
    """Draw a batch, take one optimiser step, update the average; return both losses."""
    index = demos.sample(run.rng, config.batch_size)
    target, valid = demos.chunks(index, run.model.config.horizon)
    images = random_shift(demos.images[index], config.shift_pixels, run.rng)
    proprio = demos.proprio[index]
    noise = run.rng.normal(size=proprio.shape) * config.proprio_noise
    proprio = proprio + (noise * run.model.config.proprio_std).astype(np.float32)
    unknown = run.model.config.vocabulary.index(UNK)
    ids = drop_words(words[demos.task[index]], config.word_dropout, unknown, run.rng)
    device = config.device
    with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=bf16):
        out = run.model(
            to_pixel_values(images).to(device),
            ids.to(device),
            torch.from_numpy(proprio).to(device),
            with_tokens=True,
        )
    l1, entropy = cloning_loss(
        out.actions,
        out.token_logits,
        torch.from_numpy(target).to(device),
        torch.from_numpy(valid).to(device),
        config,
    )
    run.optimizer.zero_grad()
    (l1 + config.token_loss_weight * entropy).backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.step += 1
    # Early on, the average must forget the fresh weights faster.
    decay = min(config.ema, (1 + run.step) / (10 + run.step))
    with torch.no_grad():
        average: list[torch.Tensor] = list(run.ema.parameters())
        current: list[torch.Tensor] = list(run.model.parameters())
        torch._foreach_lerp_(average, current, 1.0 - decay)
    return float(l1.detach()), float(entropy.detach())


@torch.no_grad()
def validate(
    model: MiniVLA, demos: DemoSet, words: torch.Tensor, config: MiniConfig, limit: int = 512
) -> dict[str, float]:
    """Return losses on frames of the held-out episodes; empty if there are none."""
    index = demos.held_out(limit)
    totals = np.zeros(2)
    for part in np.array_split(index, max(1, math.ceil(len(index) / 64))):
        if len(part) == 0:
            return {}
        target, valid = demos.chunks(part, model.config.horizon)
        out = model(
            to_pixel_values(demos.images[part]).to(config.device),
            words[demos.task[part]].to(config.device),
            torch.from_numpy(demos.proprio[part]).to(config.device),
            with_tokens=True,
        )
        losses = cloning_loss(
            out.actions,
            out.token_logits,
            torch.from_numpy(target).to(config.device),
            torch.from_numpy(valid).to(config.device),
            config,
        )
        totals += len(part) * np.array([float(x) for x in losses])
    l1, entropy = totals / len(index)
    return {"val/l1": float(l1), "val/token_cross_entropy": float(entropy)}


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
    words = tokenize(demos.instructions)
    with SummaryWriter(str(output)) as writer:
        _loop(run, demos, words, config, writer)
        result: dict[str, Any] = {
            "steps": run.step,
            "minutes": round(run.seconds / 60, 2),
            "frames": len(demos.images),
            "instructions": demos.instructions,
            **validate(run.ema, demos, words, config),
        }
        _save(run, output)
        if config.eval_episodes:
            from vla_gym_trainers.vla_rollout import evaluate_sampled, tasks_of_instructions

            tasks = tasks_of_instructions(demos.instructions)
            result["closed_loop"] = evaluate_sampled(
                str(output / "model"), tasks, config.eval_episodes, seed=10_000 + config.seed
            )
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def _loop(
    run: _Run, demos: DemoSet, words: torch.Tensor, config: MiniConfig, writer: SummaryWriter
) -> None:
    """Take steps until the time or the number of steps is used up."""
    bf16 = use_bf16(config.precision, config.device)
    minutes, steps, output = config.minutes, config.steps, Path(config.output)
    total = minutes * 60 if minutes is not None else float(steps or 0)
    snapshots = sorted(m for m in config.snapshot_minutes if m * 60 > run.seconds)
    next_save = run.seconds + config.save_minutes * 60
    logger.info("%d frames of %d tasks", len(demos.images), len(demos.instructions))
    began = time.monotonic() - run.seconds
    losses: list[tuple[float, float]] = []
    bar = tqdm(total=round(total), unit="s" if minutes is not None else "it", desc="mini")
    while True:
        used = run.seconds if minutes is not None else float(run.step)
        bar.update(min(int(used), round(total)) - bar.n)
        if used >= total:
            break
        cosine = 0.5 * (1 + math.cos(math.pi * used / total))
        for group in run.optimizer.param_groups:
            warm = min(1.0, (run.step + 1) / 100)
            group["lr"] = config.learning_rate * warm * (0.02 + 0.98 * cosine)
        losses.append(_train_step(run, demos, words, config, bf16))
        run.seconds = time.monotonic() - began
        if run.step % 50 == 0:
            l1, entropy = np.mean(losses, axis=0)
            losses.clear()
            bar.set_postfix(step=run.step, l1=f"{l1:.4f}", ce=f"{entropy:.3f}", refresh=False)
            writer.add_scalar("train/l1", l1, run.step)
            writer.add_scalar("train/token_cross_entropy", entropy, run.step)
            writer.add_scalar("train/learning_rate", group["lr"], run.step)
            speed = run.step * config.batch_size / run.seconds
            writer.add_scalar("time/samples_per_s", speed, run.step)
        if snapshots and run.seconds >= snapshots[0] * 60:
            run.ema.save_half(output / f"model-{snapshots.pop(0):g}min")
        if run.seconds >= next_save:
            next_save += config.save_minutes * 60
            _save(run, output)
            for key, value in validate(run.ema, demos, words, config).items():
                writer.add_scalar(key, value, run.step)
    bar.close()


def _save(run: _Run, output: Path) -> None:
    run.save(output / "checkpoint.pt")
    run.ema.save_half(output / "model")
