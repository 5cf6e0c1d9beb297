"""What a run is made of: the student, its teacher and its reference, and the environments."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vla_gym.errors import ConfigError
from vla_gym.suites import get_task
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla import load
from vla_gym.vla.lora import LoraAdapters, count_parameters
from vla_gym_trainers.on_policy.collector import Actor, Collector
from vla_gym_trainers.on_policy.config import OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import World
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.policy import TokenPolicy, ValueHead
from vla_gym_trainers.on_policy.rollout import RolloutShape
from vla_gym_trainers.on_policy.teacher import MixedActor, Teacher
from vla_gym_trainers.on_policy.trainable import trainable_copy


@dataclass
class Parts:
    """Networks of a run.

    Attributes:
        policy: The student.
        adapters: Its LoRA adapters, if it has any.
        teacher: The frozen VLA.
        reference: Of the KL penalty, or None.
    """

    policy: TokenPolicy
    adapters: LoraAdapters | None
    teacher: Teacher
    reference: TokenPolicy | None

    def actor(self, config: OnPolicyConfig, phase: Phase) -> Callable[[TokenPolicy], Actor]:
        """Return what makes the actor of a phase out of the policy that acts."""
        if not config.hybrid and phase.epsilon == 0.0:
            return lambda policy: policy
        return lambda policy: MixedActor(
            policy,
            self.teacher,
            phase.epsilon,
            noise=config.teacher_noise,
            hybrid=config.hybrid,
        )

    def save(self, folder: Path) -> None:
        """Write the student: ``adapters/`` if there are any, and a plain checkpoint in ``vla/``.

        ``vla/`` has the adapters merged into it and loads as any VLA; backends whose network has
        no ``save_pretrained`` go without.
        """
        if self.adapters is not None:
            self.adapters.save(folder / "adapters")
        model: Any = self.policy.vla.model
        adapters = self.adapters
        if not hasattr(model, "save_pretrained"):
            return
        if adapters is not None:
            # One copy, so that the copied adapters are those of the copied network.
            model, adapters = copy.deepcopy((model, adapters))
            adapters.merge()
        with _no_progress_bar():
            model.save_pretrained(folder / "vla")


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging as hf_logging

    enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            hf_logging.enable_progress_bar()


def make_parts(config: OnPolicyConfig, vla: Any = None) -> Parts:
    """Make the networks; the VLA itself is not touched.

    Args:
        config: All settings.
        vla: The VLA; default: the one that the configuration names.

    Raises:
        ConfigError: If the VLA has no token head, or other settings do not fit it.
    """
    vla = load(config.vla, device=config.device) if vla is None else vla
    torch.manual_seed(config.seed)
    modules = {name for name, _ in vla.model.named_modules()}
    student, adapters = trainable_copy(
        vla,
        config.trainable,
        lora=config.lora(modules),
        heads=config.heads if config.trainable == "heads" or config.fresh_heads else (),
        fresh_heads=config.fresh_heads,
    )
    head = None
    if isinstance(config, PPOConfig):
        head = ValueHead(vla.hidden_size).to(next(vla.model.parameters()).device)
    policy = TokenPolicy(
        student,
        temperature=config.temperature,
        value_head=head,
        value_through_trunk=isinstance(config, PPOConfig) and config.value_through_trunk,
    )
    reference = policy.twin() if config.kl_coef > 0.0 else None
    return Parts(policy, adapters, Teacher(vla, config.teacher_head), reference)


def describe(parts: Parts) -> str:
    """Return how many parameters are trained."""
    return str(count_parameters(parts.policy.vla.model))


@dataclass
class Worlds:
    """Makes the environments of a run.

    Attributes:
        train: Makes those of training, with groups.
        evaluation: Makes those of validation.
        max_control_steps: Longest episode.
        tasks: Ids of the tasks of an evaluation.
    """

    train: Callable[[], LiberoVectorEnv]
    evaluation: Callable[[], LiberoVectorEnv]
    max_control_steps: int
    tasks: tuple[int, ...]


def libero_worlds(config: OnPolicyConfig, parts: Parts) -> Worlds:
    """Return the LIBERO environments that a configuration asks for.

    Raises:
        ConfigError: If the chunk is longer than the VLA's horizon.
        UnknownTaskError: If there is no such task.
    """
    vla = parts.policy.vla
    chunk_len = config.chunk_len or vla.horizon
    if not 1 <= chunk_len <= vla.horizon:
        raise ConfigError(f"chunk_len must be in 1..{vla.horizon}, got {chunk_len}.")
    tasks = config.tasks()
    shared: dict[str, Any] = {
        "workers": config.workers,
        "task_ids": list(tasks),
        "chunk_len": chunk_len,
        "image_size": vla.image_size,
        "assets": config.assets,
        "physics": config.physics,
        "gamma": config.gamma,
    }

    def train() -> LiberoVectorEnv:
        own: dict[str, Any] = {
            "task_sampling": config.task_sampling,
            "group_size": config.group_size,
        }
        return LiberoVectorEnv(config.num_envs, config.suite, **own, **shared)

    def evaluation() -> LiberoVectorEnv:
        own: dict[str, Any] = {"autoreset_mode": "DISABLED"}
        return LiberoVectorEnv(config.eval_envs, config.suite, **own, **shared)

    limit = max(get_task(config.suite, task_id).max_control_steps for task_id in tasks)
    return Worlds(train, evaluation, limit, tuple(tasks))


def make_collector(
    config: OnPolicyConfig,
    policy: TokenPolicy,
    envs: LiberoVectorEnv,
    worlds: Worlds,
    world: World,
) -> Collector:
    """Return the collector of this process."""
    chunk_len = (envs.single_action_space.shape or (1,))[0]
    chunks = config.rollout_chunks
    if config.episodes_per_env is not None:
        chunks = math.ceil(worlds.max_control_steps / chunk_len)
    shape = RolloutShape(
        num_envs=config.num_envs,
        num_chunks=chunks,
        episodes=config.episodes_per_env,
        horizon=policy.horizon,
        frame_size=policy.stored_size,
        group_size=config.group_size,
        first_env=world.rank * config.num_envs,
        query_size=policy.vla.hidden_size if policy.needs_values else 0,
    )
    return Collector(envs, shape, overlap=config.overlap)
