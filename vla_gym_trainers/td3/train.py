"""``vla-gym-train td3``: TD3+BC on LIBERO tasks from a frozen VLA, in one run directory."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vla_gym.demos.starts import DemoStarts, read_starts
from vla_gym.rl_token import choose_rl_token
from vla_gym.rollout import Start, make_envs
from vla_gym.rollout.episodes import sampled_starts
from vla_gym.suites import get_suite, get_task
from vla_gym.vla import load
from vla_gym_trainers.evaluation.actor_policy import ActorPolicy
from vla_gym_trainers.evaluation.run_player import RunPlayer
from vla_gym_trainers.evaluation.tables import print_results
from vla_gym_trainers.explorer.actions import ExplorerActions
from vla_gym_trainers.explorer.player import load_player
from vla_gym_trainers.runs.result_card import machine_facts
from vla_gym_trainers.runs.run import Run, TrainingRun
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.sb3_vec_env import SB3VecEnv, make_sb3_vec_env
from vla_gym_trainers.runs.settings import EVAL_SEED, check_run
from vla_gym_trainers.runs.torch_helpers import load_tensors
from vla_gym_trainers.td3.algorithm import TD3BC
from vla_gym_trainers.td3.callback import RunCallback, StopRun
from vla_gym_trainers.td3.checkpoint import load_checkpoint
from vla_gym_trainers.td3.closed_loop import BestModel
from vla_gym_trainers.td3.config import TD3RunConfig
from vla_gym_trainers.td3.policy import RLTokenPolicy
from vla_gym_trainers.td3.prior_data import demo_replay, task_files
from vla_gym_trainers.world_model.protocol import load_world_model
from vla_gym_trainers.world_model.wrapper import WorldModelObservation

#: Environments of the evaluations during training.
EVAL_ENVS = 8
#: Added to a run's seed: layouts that neither training nor the choice of the best policy played.
GUARD_SEED = 1_500_000_000


def main(config: TD3RunConfig) -> str:
    """Run ``vla-gym-train td3``; return what is printed."""
    run = train_td3(config)
    if evaluation := run.card["results"].get("evaluation"):
        print_results(evaluation["start"], "The VLA")
        print_results(evaluation["policy"], "The policy")
    return f"run directory: {run.run_dir}"


def train_td3(config: TD3RunConfig) -> TrainingRun:
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
            if config.prior_demos is not None:
                model.replay_buffer.prior = demo_replay(config, env.vector_env)
        else:
            model, state = load_checkpoint(run.checkpoint.folder, env, config.device)

        def open_player() -> RunPlayer:
            return stack.enter_context(closing(make_player(config)))

        player = open_player() if config.eval_every or config.film_every else None
        best = None
        if player is not None and config.eval_every:  # in the background if ahead > 1
            layouts = _sampled_starts(config, config.eval_layouts, EVAL_SEED)
            best = BestModel(player, layouts, run.dir, config.eval_every, config.ahead > 1)
            stack.enter_context(closing(best))
        starts = _sampled_starts(config, 1, EVAL_SEED)
        film_policy = partial(film_training, player, starts) if player else None
        callback = RunCallback(run, best, film_policy)
        if state is not None:
            callback.restore(state)
        model.set_logger(run.logger)
        with run.training():
            learn(model, config, callback)
        return conclude(config, run, model, callback.summary(model), player or open_player())


def _sampled_starts(config: TD3RunConfig, layouts: int, seed: int) -> list[Start]:
    suite = get_suite(config.suite).name
    return sampled_starts(suite, config.tasks(), layouts, seed + config.seed)


def conclude(
    config: TD3RunConfig, run: Run, model: TD3BC, training: dict[str, Any], player: RunPlayer
) -> TrainingRun:
    """Save the policy, guard it, evaluate it beside the VLA, film it and write the card."""
    results: dict[str, Any] = {"training": training}
    files = run.dir
    has_best, tuner = files.best.is_file(), model.fine_tuner
    if tuner is None:
        model.policy.save(files.last)
    final = RLTokenPolicy.load(files.best, model.device) if has_best else model.policy
    if tuner is not None:
        if has_best:
            tuner.load_state_dict(load_tensors(files.best_vla))
        tuner.save(files.path)
        player.use(tuner.vla, tuner.encoder)
    if config.guard_layouts:
        starts = _sampled_starts(config, config.guard_layouts, GUARD_SEED)
        results["guard"] = guard_policy(final, player, starts)
    final.save(files.policy)
    policy = RLTokenPolicy.load(files.policy)
    if config.eval_states != 0:
        starts = config.final_starts(config.eval_states)
        results["evaluation"] = player.evaluate(policy, starts)
    if config.videos:
        film(config, files, policy, player)
    world = {**config.world_facts(), **player.facts(), **machine_facts()}
    return TrainingRun(files.path, run.write_card(results, world))


def guard_policy(
    policy: RLTokenPolicy, player: RunPlayer, starts: Sequence[Start]
) -> dict[str, Any]:
    """Let the VLA play the tasks in which a policy had fewer successes on the same starts.

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
    guarded = [task for task in sorted(vla) if mine[task] < vla[task]]
    policy.guarded_tasks = tuple(guarded)
    rows = [
        {
            "task_id": task,
            "episodes": count,
            "vla_successes": vla[task],
            "policy_successes": mine[task],
            "plays": "vla" if task in guarded else "policy",
        }
        for task, count in sorted(Counter(start.task_id for start in starts).items())
    ]
    return {"num_guarded": len(guarded), "guarded_tasks": guarded, "by_task": rows}


def learn(model: TD3BC, config: TD3RunConfig, callback: RunCallback) -> None:
    """Collect and learn up to ``total_timesteps``, or to the time limit."""
    left = config.total_timesteps - model.num_timesteps
    try:
        if left > 0:
            model.learn(left, callback=callback, log_interval=10, reset_num_timesteps=False)
    except StopRun:
        pass
    callback.model = model
    callback.log_evaluation(wait=True)
    if callback.saved_at != model.num_timesteps:
        callback.save()  # so that a longer limit can go on from here


def make_vec(config: TD3RunConfig) -> SB3VecEnv:
    """Make the environments of the training.

    Raises:
        ConfigError: If ``explore_with`` names no explorer's run.
    """
    num_envs, workers = config.num_envs, config.workers
    if workers is None and num_envs == 1:
        workers = 0
    settings: dict[str, Any] = {
        "suite": config.suite,
        "workers": workers,
        "hosts": config.hosts,
        "task_ids": list(config.tasks()),
        "task_sampling": "uniform",
        "gamma": config.gamma,
        "visual_profile": config.visual_profile,
        "vla": config.vla,
        "rl_token": config.rl_token,
        "device": config.rollout_device or config.device,
        "chunk_len": config.chunk_len,
        **config.env_kwargs(),
    }
    if config.stride:
        settings["stride"] = config.stride
    if config.demo_starts and config.prior_demos is not None:
        tasks = {i: get_task(config.suite, i) for i in config.tasks()}
        demos = read_starts(task_files(config.prior_demos, tasks))
        settings["env_wrappers"] = [partial(DemoStarts, demos=demos, share=config.demo_starts)]
    if config.vla_update_freq:
        settings["keep_inputs"] = True
    if config.explore_with is not None:
        check_run(config.explore_with, ("explorer", "adversarial"), "--explore-with")
    if config.world_model is not None or config.explore_with is not None:
        settings["wrap_envs"] = partial(_wrapped, config=config, device=settings["device"])
    return make_sb3_vec_env("LiberoVLA-v0", num_envs, **settings)


def _wrapped(envs: Any, config: TD3RunConfig, device: str) -> Any:
    """Return environments with the world model's memory and with the explorer's actions."""
    if config.world_model is not None:
        envs = WorldModelObservation(
            envs, config.world_model, config.reward_weights(), device=device
        )
    if config.explore_with is not None:
        explorer = load_player(config.explore_with, seed=config.seed, device=device)
        envs = ExplorerActions(envs, explorer, config.explore_share)
    return envs


def make_player(config: TD3RunConfig) -> RunPlayer:
    """Make what plays the run's policies: on sampled layouts and on the official states.

    Films are made on this machine, whatever ``hosts`` says.

    Raises:
        ConfigError, WeightsError: If VLA and encoder cannot be loaded or do not fit each other.
    """
    device, look, world_model = config.rollout_device or config.device, config.own_look(), None
    model = load(config.vla, device=device)
    encoder = choose_rl_token(config.rl_token, model, device)
    length = config.chunk_len or model.horizon
    if config.world_model is not None:
        world_model = load_world_model(config.world_model, device, vlas={config.vla: model})
    policy = ActorPolicy(None, model, encoder, length, world_model=world_model)
    envs = make_envs(
        get_suite(config.suite).name,
        config.tasks(),
        policy,
        num_envs=EVAL_ENVS,
        workers=config.workers,
        hosts=config.hosts,
        **look,
    )
    return RunPlayer(envs, length, model, encoder, world_model, **look)


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


def film(config: TD3RunConfig, run: RunDir, policy: RLTokenPolicy, player: RunPlayer) -> None:
    """Film the VLA and the policy where every task's evaluation begins."""
    run.videos.mkdir(exist_ok=True)
    for k, start in enumerate(config.final_starts(config.videos)):
        place = f"task{start.task_id:02d}_state{k % config.videos:02d}"
        player.film(None, [start], run.videos / f"{place}_vla.mp4", "VLA")
        player.film(policy, [start], run.videos / f"{place}_policy.mp4", config.algorithm)


def film_training(player: RunPlayer, starts: Sequence[Start], model: TD3BC, path: Path) -> None:
    """Film the policy, greedy, as it is now, on sampled layouts."""
    if (tuner := model.fine_tuner) is not None:
        player.use(tuner.vla, tuner.encoder)
    # A copy: playing switches a policy out of its training mode.
    player.film(copy.deepcopy(model.policy), starts, path, "TD3+BC")
