"""``vla-gym-train ppo | grpo``: one run directory, from the first rollout to the result card."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.trained import HEADS, trained_vla
from vla_gym_trainers.on_policy.config import OnPolicyConfig
from vla_gym_trainers.on_policy.distributed import process_group
from vla_gym_trainers.on_policy.loop import Loop
from vla_gym_trainers.on_policy.networks import EnvFactories, describe
from vla_gym_trainers.runs.result_card import machine_facts
from vla_gym_trainers.runs.run import Run, TrainingRun
from vla_gym_trainers.runs.run_dir import RunDir


def train(
    config: OnPolicyConfig,
    *,
    vla: Any = None,
    envs: EnvFactories | None = None,
    kind: Callable[..., Loop] = Loop,
) -> TrainingRun:
    """Train; with ``eval_states``, evaluate start and policy on the official states; write a card.

    Under ``torchrun`` each process plays its own environments and all learn together.

    Args:
        config: All settings; ``resume`` and ``auto_resume`` say whether a run goes on.
        vla: A backend in place of the one that the configuration names.
        envs: Environments in place of LIBERO's; there are no films and no final evaluation then.
        kind: Makes the loop.

    Returns:
        The run directory and the card, which is empty in further processes of a data-parallel run.
        The directory has ``best.safetensors`` and ``last.safetensors`` (what is trained) and, to be
        used, ``adapters/`` and ``vla/``: of the best one if there was a validation, else the last.

    Raises:
        ConfigError: If the run directory holds another run, or settings do not fit each other.
    """
    with process_group(config.device) as group:
        if group.size > 1 and config.run_dir is None and config.resume is None:
            raise ConfigError("With several processes, give a --run-dir.")
        run = Run(config, total=config.planned_steps(), unit="env_step", is_main=group.rank == 0)
        torch.set_num_threads(config.torch_threads)
        group.sum([0.0])  # all have looked for a checkpoint before process 0 writes anything
        with run, ExitStack() as stack:
            loop = kind(config, run, group, stack, vla=vla, envs=envs)
            if run.is_main:
                sys.stdout.write(f"{describe(loop.policy)}\n")
            with run.training():
                loop.train()
            loop.finish()
            stack.close()  # the final evaluation has environments of its own
            return TrainingRun(run.dir.path, _card(config, run, loop) if run.is_main else {})


def _card(config: OnPolicyConfig, run: Run, loop: Loop) -> dict[str, Any]:
    progress, trained = loop.progress, describe(loop.policy)
    training = {**progress.summary(), **run.throughput(progress.steps)}
    results: dict[str, Any] = {"training": training, "trained": trained}
    if loop.validation is not None:
        results["validation"] = {
            "best": loop.validation.best,
            "history": [list(pair) for pair in loop.validation.history],
        }
    if loop.is_libero:
        results |= loop.results()
    world = {**config.world_facts(), **machine_facts()}
    if loop.is_libero and config.eval_states != 0:
        results["evaluation"], facts = final_evaluation(config, run.dir)
        world |= {key: facts.get(key) for key in ("gl_renderer", "visual_profile")}
    return run.write_card(results, world)


def main(config: OnPolicyConfig) -> str:
    """Train; return what is printed: nothing in further processes of a data-parallel run."""
    run = train(config)
    if not run.card:
        return ""
    training = run.card["results"]["training"]
    lines = [
        f"{training['env_steps']:,} control steps, {training['rollouts']} rollouts, "
        f"{training['minutes']:.1f} minutes"
    ]
    validation = run.card["results"].get("validation")
    if validation and validation["history"]:
        first, best = validation["history"][0][1], validation["best"]
        lines.append(f"sampled layouts, greedy: {first:.3f} at the start, best {best:.3f}")
    return "\n".join([*lines, f"run directory: {run.run_dir}"])


def final_evaluation(config: OnPolicyConfig, run: RunDir) -> tuple[dict[str, Any], dict[str, Any]]:
    """Play the VLA as it was and the policy, greedily, on the same official states.

    The cards are ``eval_start/card.json`` and ``eval_policy/card.json``, the second one with the
    paired comparison.

    Returns:
        The results of both, and what the second card says of the world.
    """
    from vla_gym_trainers.evaluation.command import run_eval
    from vla_gym_trainers.evaluation.config import EvalConfig

    common: dict[str, Any] = {
        "suite": (config.suite,),
        "task_ids": config.tasks(),
        "episodes": config.eval_states,
        "device": config.device,
        "chunk_len": config.chunk_len,
        **config.own_look(),
        "workers": config.workers,
        "hosts": config.hosts,
        "torch_threads": config.torch_threads,
        "progress": config.progress,
    }
    if not config.needs_its_run and trained_vla(run.path, config.vla) is None:
        return {"skipped": "this VLA cannot be saved as a plain checkpoint"}, {}
    head: Any = None if config.needs_its_run else HEADS.get(config.policy)
    start, policy = run.path / "eval_start", run.path / "eval_policy"
    of_start = EvalConfig(vla=config.vla, head=head, out=start, resume=True, **common)
    try:
        before = run_eval(of_start)
    except ConfigError:  # of other states or versions, before the run was resumed
        shutil.rmtree(start, ignore_errors=True)
        before = run_eval(of_start)
    shutil.rmtree(policy, ignore_errors=True)  # of a run that went on since
    trained: dict[str, Any] = {"policy": str(run.path), "vla": config.vla}
    after = run_eval(EvalConfig(out=policy, paired=start, **trained, **common))
    return {"start": before["results"], "policy": after["results"]}, after["environment"]
