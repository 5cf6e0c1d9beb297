"""``vla-gym-train ppo | grpo``: one run directory, from the first rollout to the result card."""

from __future__ import annotations

import datetime
import shutil
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vla_gym.errors import ConfigError
from vla_gym.rollout.episodes import sampled_starts
from vla_gym.suites import get_suite
from vla_gym_trainers.evaluation.trained_on import trained_vla
from vla_gym_trainers.on_policy.config import RESUMABLE, OnPolicyConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup, process_group
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.loop import Loop
from vla_gym_trainers.on_policy.networks import (
    EnvFactories,
    describe,
    libero_envs,
    make_collector,
    make_networks,
)
from vla_gym_trainers.on_policy.validation import Validation
from vla_gym_trainers.runs.closed_loop import EVAL_SEED
from vla_gym_trainers.runs.metrics import RunLogger
from vla_gym_trainers.runs.result_card import machine_facts, make_card, write_json
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.settings import check_resumable, read_settings
from vla_gym_trainers.runs.stopping import StopRequest, stoppable


@dataclass(frozen=True)
class OnPolicyRun:
    """What a training run leaves.

    Attributes:
        run_dir: ``config.json``, ``metrics.jsonl``, ``tensorboard/``, ``checkpoints/``,
            ``best.safetensors`` and ``last.safetensors`` (what is trained), ``adapters/`` and
            ``vla/`` (the policy to use: the best one if there was a validation, else the last
            one), ``card.json``.
        card: The result card.
    """

    run_dir: Path
    card: dict[str, Any]


def train(
    config: OnPolicyConfig,
    *,
    resume: bool = False,
    vla: Any = None,
    envs: EnvFactories | None = None,
) -> OnPolicyRun:
    """Train; with ``eval_states``, evaluate start and policy on the official states; write a card.

    Under ``torchrun`` each process plays its own environments and all learn together.

    Args:
        config: All settings.
        resume: Go on with the run in ``config.run_dir``, from its newest checkpoint.
        vla: A backend in place of the one that the configuration names.
        envs: Environments in place of LIBERO's; there is no final evaluation then.

    Raises:
        ConfigError: If the run directory holds another run, or settings do not fit each other.
    """
    with process_group(config.device) as group:
        run = RunDir(config.run_dir or default_run_dir(config))
        if group.size > 1 and config.run_dir is None:
            raise ConfigError("With several processes, give a --run-dir.")
        if resume:
            check_resumable(read_settings(run.config, type(config)), config, RESUMABLE)
        elif run.checkpoints():
            raise ConfigError(
                f"{run.path} holds a run already: go on with 'vla-gym-train {config.algorithm} "
                f"--resume {run.path}', or give another --run-dir."
            )
        with stoppable(run, config.algorithm) as request:
            return _train(config, run, group, vla, envs, request)


def _train(
    config: OnPolicyConfig,
    run: RunDir,
    group: ProcessGroup,
    vla: Any,
    envs: EnvFactories | None,
    request: StopRequest,
) -> OnPolicyRun:
    torch.set_num_threads(config.torch_threads)
    is_first, is_libero = group.rank == 0, envs is None
    networks = make_networks(config, vla)
    policy = networks.policy
    envs = envs or libero_envs(config, networks)
    with ExitStack() as stack:
        if is_first:
            stack.enter_context(run.lock())
            write_json(run.config, config)
            sys.stdout.write(f"{describe(policy)}\n")
        learner = Learner(policy, config, reference=networks.reference, group=group)
        train_envs = stack.enter_context(closing(envs.train()))
        collector = make_collector(config, policy, train_envs, envs.max_control_steps, group)
        validation = None
        if is_first and config.eval_every:
            eval_envs = stack.enter_context(closing(envs.evaluation()))
            seed = EVAL_SEED + config.seed
            starts = sampled_starts(
                get_suite(config.suite).name, envs.tasks, config.eval_layouts, seed
            )
            validation = Validation(eval_envs, policy, networks.teacher, starts, config.eval_every)
        loop = Loop(
            config,
            networks,
            collector,
            learner,
            group=group,
            run=run,
            validation=validation,
            request=request,
        )
        newest = run.checkpoints()[-1:]
        logged = loop.restore(newest[0]) if newest else None
        if is_first:
            loop.logger = RunLogger(run.metrics, run.tensorboard, logged)
            stack.enter_context(closing(loop.logger))
        with request.deferred():
            loop.run()
        loop.finish()
    card: dict[str, Any] = {}
    if is_first:
        card = _card(config, run, loop, is_libero)
    return OnPolicyRun(run.path, card)


def _card(config: OnPolicyConfig, run: RunDir, loop: Loop, is_libero: bool) -> dict[str, Any]:
    trained = describe(loop.networks.policy)
    results: dict[str, Any] = {"training": loop.progress.summary(), "trained": trained}
    if loop.validation is not None:
        results["validation"] = {
            "best": loop.validation.best,
            "history": [list(pair) for pair in loop.validation.history],
        }
    if is_libero and config.eval_states != 0:
        results["evaluation"] = final_evaluation(config, run)
    facts = {"asset_pack": config.assets, "physics": config.physics, **machine_facts()}
    card = make_card(
        config.algorithm,
        config=config,
        seeds={"run": config.seed},
        environment=facts,
        results=results,
    )
    write_json(run.card, card)
    return card


def final_evaluation(config: OnPolicyConfig, run: RunDir) -> dict[str, Any]:
    """Play the VLA's token head as it was and the policy, greedily, on the same official states.

    The cards are ``eval_start/card.json`` and ``eval_policy/card.json``, the second one with the
    paired comparison.
    """
    from vla_gym_trainers.evaluation.command import run_eval
    from vla_gym_trainers.evaluation.config import EvalConfig

    common: dict[str, Any] = {
        "suite": (config.suite,),
        "task_ids": config.tasks(),
        "episodes": config.eval_states,
        "device": config.device,
        "chunk_len": config.chunk_len,
        "assets": config.assets,
        "physics": config.physics,
        "workers": config.workers,
        "torch_threads": config.torch_threads,
        "progress": config.progress,
    }
    if config.policy == "rl-token":
        trained: dict[str, Any] = {"policy": str(run.path)}
    else:
        common["head"] = "token"
        name = trained_vla(run.path, config.vla)
        if name is None:
            return {"skipped": "this VLA cannot be saved as a plain checkpoint"}
        trained = {"vla": name}
    start, policy = run.path / "eval_start", run.path / "eval_policy"
    before = run_eval(EvalConfig(vla=config.vla, out=start, resume=True, **common))
    shutil.rmtree(policy, ignore_errors=True)  # of a run that went on since
    after = run_eval(EvalConfig(out=policy, paired=start, **trained, **common))
    return {"start": before["results"], "policy": after["results"]}


def default_run_dir(config: OnPolicyConfig) -> Path:
    """Return ``runs/<algorithm>-<suite>-<time>`` under the working directory."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{config.algorithm}-{config.suite}-{stamp}"
