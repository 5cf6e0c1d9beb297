"""``vla-gym-train td3``: TD3+BC on LIBERO tasks from a frozen VLA, in one run directory."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stable_baselines3.common.vec_env import VecEnv

from vla_gym.assets import resolve_asset_pack
from vla_gym.rollout import Start
from vla_gym.rollout.episodes import sampled_starts
from vla_gym.suites import get_suite
from vla_gym_trainers.evaluation.evaluate import load_policy
from vla_gym_trainers.evaluation.run_player import RunPlayer, make_run_player
from vla_gym_trainers.runs.checkpoint import load_checkpoint
from vla_gym_trainers.runs.closed_loop import EVAL_SEED, BestModel
from vla_gym_trainers.runs.guard import GUARD_SEED, guard_policy
from vla_gym_trainers.runs.result_card import machine_facts, make_card, write_json
from vla_gym_trainers.runs.run import Run
from vla_gym_trainers.runs.run_dir import RunDir, replacing
from vla_gym_trainers.runs.sb3_vec_env import make_sb3_vec_env
from vla_gym_trainers.runs.settings import load_run_settings
from vla_gym_trainers.td3.algorithm import TD3BC
from vla_gym_trainers.td3.callback import RunCallback, StopRun
from vla_gym_trainers.td3.config import TD3RunConfig
from vla_gym_trainers.td3.run_config import RunConfig

__all__ = [
    "TD3RunConfig",
    "TD3Run",
    "build_model",
    "make_vec",
    "resume_td3",
    "train_td3",
]

#: Environments of the evaluations during training.
EVAL_ENVS = 8


@dataclass(frozen=True)
class TD3Run:
    """What a training run leaves.

    Attributes:
        run_dir: See :class:`vla_gym_trainers.runs.run_dir.RunDir`.
        card: The result card.
    """

    run_dir: Path
    card: dict[str, Any]


def train_td3(config: TD3RunConfig) -> TD3Run:
    """Train, evaluate the VLA and the policy on the same official states, write the card.

    Args:
        config: All settings; ``resume`` and ``auto_resume`` say whether a run goes on. With
            ``ahead`` 0 and 1 it goes on bit for bit as it would have gone on.

    Returns:
        The run directory and the card.

    Raises:
        ConfigError: If the run directory holds another run's checkpoints, or settings differ that
            must not.
    """
    torch.set_num_threads(config.torch_threads)
    with Run(config, total=config.total_timesteps, unit="chunk") as run, ExitStack() as stack:
        env = stack.enter_context(closing(make_vec(config)))
        state = None
        if run.checkpoint is None:
            model = build_model(config, env)
        else:
            model, state = load_checkpoint(run.checkpoint.folder, env, TD3BC, config.device)
        best = open_best(config, run.dir, stack, config.ahead > 1)
        callback = RunCallback(config, run, best)
        if state is not None:
            callback.restore(state)
        model.set_logger(run.logger)
        with run.training():
            learn(model, config, callback)
        return conclude(config, run.dir, model, callback.summary(model), stack)


def resume_td3(run_dir: Path, config: TD3RunConfig | None = None) -> TD3Run:
    """Go on with a run from its newest checkpoint, or from the checkpoint that is named.

    Args:
        run_dir: The run's folder, or one of its checkpoints.
        config: Its settings, of which those in ``resumable`` may differ; None for the same.

    Raises:
        ConfigError: If there is no run, or a setting differs that must not.
    """
    if config is None:
        return train_td3(load_run_settings(run_dir, TD3RunConfig))
    return train_td3(dataclasses.replace(config, resume=run_dir))


def open_best(
    config: RunConfig, run: RunDir, stack: ExitStack, background: bool = False
) -> BestModel | None:
    """Return what evaluates during training, with environments of its own; None without."""
    if not config.eval_every:
        return None
    player = stack.enter_context(closing(make_player(config)))
    starts = _sampled_starts(config, config.eval_layouts, EVAL_SEED)
    best = BestModel(player, starts, run, config.eval_every, background)
    stack.enter_context(closing(best))
    return best


def _sampled_starts(config: RunConfig, layouts: int, seed: int) -> list[Start]:
    suite = get_suite(config.suite).name
    return sampled_starts(suite, config.task_ids, layouts, seed + config.seed)


def conclude(
    config: RunConfig, run: RunDir, model: TD3BC, training: dict[str, Any], stack: ExitStack
) -> TD3Run:
    """Save the policy, guard it, evaluate it beside the VLA, film it and write the card.

    Args:
        config: Settings.
        run: The run's folder.
        model: Holds the policy as it is at the end.
        training: Goes into the card.
        stack: Closes what is opened here.
    """
    results: dict[str, Any] = {"training": training}
    _save(model, run.last)
    final = load_policy(run.best) if run.best.is_file() else model
    player = stack.enter_context(closing(make_player(config)))
    if config.guard_layouts:
        starts = _sampled_starts(config, config.guard_layouts, GUARD_SEED)
        results["guard"] = guard_policy(final, player, starts).report()
    _save(final, run.policy)
    policy = load_policy(run.policy)
    states = config.eval_states
    states = get_suite(config.suite).num_init_states if states is None else states
    if states:
        results.update(player.evaluate(policy, _official_starts(config, states)))
    if config.videos:
        film(config, run, policy, player)
    card = make_card(
        config.algorithm,
        config=config,
        seeds={"run": config.seed},
        environment={**world_facts(config), **player.facts(), **machine_facts()},
        results=results,
    )
    write_json(run.card, card)
    return TD3Run(run.path, card)


def world_facts(config: RunConfig) -> dict[str, Any]:
    """Return what was played with, for a result card."""
    pack = resolve_asset_pack(config.assets)
    return {
        "asset_pack": pack.name,
        "asset_pack_digest": pack.digest,
        "physics": config.physics,
        "chunk_len": config.chunk_len,
    }


def _official_starts(config: RunConfig, states: int) -> list[Start]:
    suite = get_suite(config.suite).name
    return [Start(suite, task_id, i) for task_id in config.task_ids for i in range(states)]


def _save(model: TD3BC, path: Path) -> None:
    with replacing(path) as file:
        model.save(file)


def learn(model: TD3BC, config: TD3RunConfig, callback: RunCallback) -> None:
    """Collect and learn up to ``total_timesteps``, or to the time limit."""
    left = config.total_timesteps - model.num_timesteps
    try:
        if left > 0:
            model.learn(left, callback=callback, log_interval=10, reset_num_timesteps=False)
    except StopRun:
        pass
    callback.model = model
    callback.finish()
    if callback.saved_at != model.num_timesteps:
        callback.save()  # so that a longer limit can go on from here


def make_vec(config: Any) -> VecEnv:
    """Make the environments of the training."""
    num_envs, workers = config.num_envs, config.workers
    if workers is None and num_envs == 1:
        workers = 0
    settings: dict[str, Any] = {
        "suite": config.suite,
        "workers": workers,
        "task_ids": list(config.task_ids),
        "task_sampling": "uniform",
        "gamma": config.gamma,
        **_env(config),
    }
    if isinstance(config, TD3RunConfig) and config.stride:
        settings["stride"] = config.stride
    return make_sb3_vec_env("LiberoVLA-v0", num_envs, **settings)


def make_player(config: RunConfig) -> RunPlayer:
    """Make what plays the run's policies: on sampled layouts and on the official states."""
    return make_run_player(
        config.suite,
        config.task_ids,
        num_envs=EVAL_ENVS,
        workers=config.workers,
        **_env(config),
    )


def _env(config: RunConfig) -> dict[str, Any]:
    return {
        "vla": config.vla,
        "rl_token": config.rl_token,
        "device": config.rollout_device or config.device,
        "chunk_len": config.chunk_len,
        "assets": config.assets,
        "physics": config.physics,
    }


def build_model(config: TD3RunConfig, env: Any) -> TD3BC:
    """Return the untrained algorithm for an environment (also a toy with the same spaces)."""
    return TD3BC(
        "RLTokenPolicy",
        env,
        config.of_algorithm(),
        seed=config.seed,
        device=config.device,
        rollout_device=config.rollout_device,
    )


def film(config: RunConfig, run: RunDir, policy: TD3BC, player: RunPlayer) -> None:
    """Film the VLA and the policy on the first official states of every task."""
    run.videos.mkdir(exist_ok=True)
    for start in _official_starts(config, config.videos):
        place = f"task{start.task_id:02d}_state{start.init_state_id:02d}"
        player.film(None, [start], run.videos / f"{place}_vla.mp4", "VLA")
        player.film(policy, [start], run.videos / f"{place}_policy.mp4", config.algorithm)
