"""``vla-gym-train td3``: TD3+BC on LIBERO tasks from a frozen VLA, in one run directory."""

from __future__ import annotations

import datetime
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from stable_baselines3.common.logger import configure

from vla_gym.errors import ConfigError
from vla_gym.suites import NUM_INIT_STATES, get_task
from vla_gym_trainers.evaluate import evaluate, make_env, summarize
from vla_gym_trainers.policies import Precision
from vla_gym_trainers.result_card import environment_facts, make_card, write_json
from vla_gym_trainers.run_callback import RunCallback
from vla_gym_trainers.td3bc import TD3BC


@dataclass
class TD3Config:
    """Train TD3+BC on sampled layouts and evaluate on official states."""

    suite: str = "goal"
    """Suite name."""
    task_ids: tuple[int, ...] = (9,)
    """Tasks to train on; one policy for all of them."""
    vla: str = "mini"
    """Name or directory of the frozen VLA."""
    chunk_len: int | None = None
    """Control steps executed per chunk; None executes the VLA's whole horizon."""
    assets: str = "lite"
    """Asset pack: lite, libero, or a path."""
    physics: Literal["fast", "exact"] = "fast"
    """Physics mode."""
    seed: int = 0
    """Seed of networks, noise, replay and layouts; take run seeds at least 10,000 apart."""

    total_chunks: int = 20_000
    """Chunks to collect, warm-up included."""
    max_minutes: float | None = None
    """Stop collecting after this wall time, if it comes first."""
    learning_starts: int = 2000
    """Warm-up: chunks that play the VLA plus noise."""
    critic_warmup_steps: int = 3000
    """Critic-only gradient steps after the warm-up."""
    buffer_size: int = 100_000
    """Replay capacity in chunks."""
    train_freq: int = 8
    """Chunks between two blocks of gradient steps."""
    utd_ratio: float = 2.0
    """Critic gradient steps per chunk."""
    pipelined: bool = True
    """Learn in a second thread while collecting (same result whatever the timing)."""

    gamma: float = 0.995
    """Discount per control step."""
    learning_rate: float = 3e-4
    """Adam's step size, actor and critics."""
    batch_size: int = 256
    """Transitions per gradient step."""
    tau: float = 0.01
    """Polyak coefficient of the targets per critic step."""
    policy_delay: int = 2
    """Critic steps per actor step."""
    bc_weight: float = 1.0
    """beta: weight of the squared distance to the VLA's chunk (scaled units, summed)."""
    mc_weight: float = 0.25
    """Share of Monte-Carlo returns in the critics' targets."""
    reference_dropout: float = 0.5
    """Probability that the actor's network does not see the reference in training."""
    noise_white: float = 0.01
    """Largest exploration noise per control step (1 = full translation)."""
    noise_chunk: float = 0.06
    """Largest exploration offset shared by all steps of a chunk; each episode draws its level."""
    target_policy_noise: float = 0.02
    """Target smoothing noise."""
    target_noise_clip: float = 0.05
    """Bound of the target smoothing noise."""
    net_arch: tuple[int, ...] = (256, 256)
    """Hidden widths of actor and critics."""
    n_critics: int = 4
    """Number of critics (targets take the minimum)."""
    residual_scale: float = 1.0
    """Largest correction of the VLA's action."""
    residual_basis: int = 2
    """Correct with this many smooth time functions per dimension; 0: each control step freely."""
    precision: Precision = "auto"
    """Hidden layers in training: bf16, fp32, or bf16 where the CPU has instructions for it."""

    eval_states: int = NUM_INIT_STATES
    """Official states per task at the end, for the VLA and the policy; 0 skips it."""
    checkpoint_every: int = 5000
    """Chunks between checkpoints."""
    run_dir: Path | None = None
    """Run directory; default runs/td3-<suite>-<tasks>-<time>."""
    torch_threads: int = 1
    """Threads of torch's matrix products; more than 1 rarely helps nets this small."""
    progress: bool = True
    """Show progress bars."""

    def __post_init__(self) -> None:
        for task_id in self.task_ids:
            get_task(self.suite, task_id)
        if not self.task_ids:
            raise ConfigError("task_ids is empty: give at least one task.")
        for name, low in (("total_chunks", 1), ("eval_states", 0), ("checkpoint_every", 1)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} must be at least {low}, got {getattr(self, name)}.")
        if self.eval_states > NUM_INIT_STATES:
            raise ConfigError(f"eval_states must be at most {NUM_INIT_STATES}.")
        if self.learning_starts >= self.total_chunks:
            raise ConfigError(
                f"total_chunks ({self.total_chunks}) must exceed learning_starts "
                f"({self.learning_starts}): nothing would be learned."
            )


@dataclass(frozen=True)
class TD3Run:
    """What a training run leaves.

    Attributes:
        run_dir: Config, TensorBoard, checkpoints, ``policy.zip`` and ``card.json``.
        card: The result card.
    """

    run_dir: Path
    card: dict[str, Any]


def train_td3(config: TD3Config) -> TD3Run:
    """Train, evaluate the VLA and the policy on the same official states, write the card.

    Args:
        config: All settings.

    Returns:
        The run directory and the card.
    """
    torch.set_num_threads(config.torch_threads)
    run_dir = config.run_dir or default_run_dir(config)
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "config.json", config)
    env = make_env(config.suite, task_ids=config.task_ids, gamma=config.gamma, **_env(config))
    try:
        model = build_model(config, env)
        callback = RunCallback(config, run_dir)
        started = time.perf_counter()
        with closing(configure(str(run_dir / "tensorboard"), ["tensorboard", "csv"])) as logger:
            model.set_logger(logger)
            model.learn(config.total_chunks, callback=callback, log_interval=10)
        minutes = (time.perf_counter() - started) / 60
        model.save(run_dir / "policy.zip")
        results: dict[str, Any] = {"training": callback.summary(model, minutes)}
        if config.eval_states:
            results.update(final_evaluation(config, model, env))
        facts = environment_facts(env)
    finally:
        env.close()
    card = make_card(
        "td3", config=config, seeds={"run": config.seed}, environment=facts, results=results
    )
    write_json(run_dir / "card.json", card)
    return TD3Run(run_dir, card)


def default_run_dir(config: TD3Config) -> Path:
    """Return ``runs/td3-<suite>-<tasks>-<time>`` under the working directory."""
    tasks = "_".join(str(task_id) for task_id in config.task_ids)
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"td3-{config.suite}-{tasks}-{stamp}"


def _env(config: TD3Config) -> dict[str, Any]:
    return {
        "vla": config.vla,
        "chunk_len": config.chunk_len,
        "assets": config.assets,
        "physics": config.physics,
    }


def build_model(config: TD3Config, env: Any) -> TD3BC:
    """Return the untrained algorithm for an environment (also a toy with the same spaces)."""
    shared = (
        "learning_rate",
        "buffer_size",
        "learning_starts",
        "batch_size",
        "tau",
        "gamma",
        "train_freq",
        "utd_ratio",
        "policy_delay",
        "target_policy_noise",
        "target_noise_clip",
        "bc_weight",
        "mc_weight",
        "critic_warmup_steps",
        "reference_dropout",
        "noise_white",
        "noise_chunk",
        "pipelined",
        "seed",
    )
    policy_kwargs = {
        name: getattr(config, name)
        for name in ("net_arch", "n_critics", "residual_scale", "residual_basis", "precision")
    }
    settings = {name: getattr(config, name) for name in shared}
    return TD3BC("RLTokenPolicy", env, policy_kwargs=policy_kwargs, **settings)


def final_evaluation(config: TD3Config, model: TD3BC, env: Any) -> dict[str, Any]:
    """Evaluate VLA and policy on the same official states of every trained task."""
    baseline, trained = [], []
    for task_id in config.task_ids:
        states = range(config.eval_states)
        common: dict[str, Any] = {"env": env, "progress": config.progress}
        baseline.append(evaluate(None, config.suite, task_id, states, **common))
        trained.append(evaluate(model, config.suite, task_id, states, **common))
    return summarize(baseline, trained)
