"""What a run is made of: the student, its teacher, and the environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vla_gym.envs.registration import make_libero_vec
from vla_gym.rollout.vla_policy import check_chunk_len
from vla_gym.suites import get_suite, get_task
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla import load
from vla_gym.vla.lora import LoraAdapters, LoraSettings, count_parameters
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym_trainers.on_policy.config import OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import local_device, local_rendering
from vla_gym_trainers.on_policy.flow_policy import FlowPolicy
from vla_gym_trainers.on_policy.phases import Actor, MixedActor, Phase, Teacher, VLATeacher
from vla_gym_trainers.on_policy.policy import Policy, ValueHead
from vla_gym_trainers.on_policy.recurrent_vla import RecurrentGaussianPolicy
from vla_gym_trainers.on_policy.rl_token_policy import RLTokenPPOPolicy, vla_chunks
from vla_gym_trainers.on_policy.student import (
    check_can_be_kept,
    check_stateless,
    checkpoint_layers,
    save_student,
    trainable_copy,
)
from vla_gym_trainers.on_policy.vla_policy import (
    GaussianPolicy,
    OwnPolicy,
    TokenPolicy,
    VLAPolicy,
)
from vla_gym_trainers.world_model.protocol import WORLD_MEMORY, WorldModel, load_world_model


@dataclass
class Networks:
    """Networks of a run.

    Attributes:
        policy: The student.
        adapters: Its LoRA adapters, if it has any.
        teacher: The frozen VLA.
        chunk_len: Control steps executed a chunk.
        world_model: Beside the policy, or None.
    """

    policy: Policy
    adapters: LoraAdapters | None
    teacher: Teacher
    chunk_len: int
    world_model: WorldModel | None = None

    def watched(self, envs: Any, rewards: Mapping[str, float] | None = None) -> Any:
        """Return environments with the world model's memory and rewards; the same without one.

        Also where nothing is paid and the policy does not see the memory.

        Raises:
            ConfigError: If they do not fit the world model.
        """
        unseen = WORLD_MEMORY not in self.policy.observation
        if self.world_model is None or (rewards is None and unseen):
            return envs
        from vla_gym_trainers.world_model.wrapper import WorldModelObservation

        return WorldModelObservation(envs, self.world_model, rewards)

    def actor(self, policy: Policy, config: OnPolicyConfig, phase: Phase) -> Actor:
        """Return who acts in a phase: the policy, or a mixture with the teacher."""
        if phase.epsilon == 0.0:
            return policy
        assert isinstance(self.teacher, VLATeacher)
        return MixedActor(policy, self.teacher, phase.epsilon, noise=config.teacher_noise)

    def save(self, folder: Path) -> None:
        """Write the student, as ``vla-gym eval --policy`` takes it; a VLA by ``save_student``."""
        if isinstance(self.policy, RLTokenPPOPolicy):
            self.policy.actor.save(folder)
            return
        assert isinstance(self.policy, VLAPolicy)
        save_student(self.policy.vla, self.adapters, folder)


def make_networks(config: OnPolicyConfig, vla: Any = None) -> Networks:
    """Make the networks; the VLA, by default the one that the settings name, is not touched.

    Raises:
        ConfigError: If the VLA cannot be trained that way, or other settings do not fit it.
    """
    device = local_device(config.device)
    vla = load(config.vla, device=device) if vla is None else vla
    chunk_len = check_chunk_len(config.chunk_len, vla)
    world_model = None
    if config.world_model is not None:
        world_model = load_world_model(config.world_model, device, vlas={config.vla: vla})
    torch.manual_seed(config.seed)
    policy: Policy
    teacher: Teacher
    if config.policy == "rl-token":
        size = 0 if world_model is None else world_model.state_size
        policy, adapters = RLTokenPPOPolicy(config, vla, chunk_len, size), None
        teacher = vla_chunks
    else:
        check_stateless(vla, f"with --policy {config.policy}")
        policy, adapters = _vla_policy(config, vla, chunk_len)
        teacher = _kind(config, vla).act
        if config.policy == "tokens":
            teacher = VLATeacher(vla, config.teacher_head)
    return Networks(policy, adapters, teacher, chunk_len, world_model)


def _vla_policy(
    config: OnPolicyConfig, vla: Any, chunk_len: int
) -> tuple[VLAPolicy, LoraAdapters | None]:
    modules = {name for name, _ in vla.model.named_modules()}
    exclude = tuple(name for name in config.heads_without_adapters() if name in modules)
    lora = LoraSettings(
        r=config.lora_r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=config.lora_targets or "all-linear",
        exclude=exclude,
        train_whole=config.lora_train_whole,
    )
    check_can_be_kept(vla, config.trainable)
    heads = config.trained_heads() if config.trainable == "heads" or config.fresh_heads else ()
    student, adapters = trainable_copy(
        vla, config.trainable, lora=lora, heads=heads, fresh_heads=config.fresh_heads
    )
    if config.gradient_checkpointing:
        checkpoint_layers(student)
    head, memory = None, dict[str, Any]()
    if isinstance(config, PPOConfig):
        size = vla.hidden_size + config.memory_size
        head = ValueHead(size).to(next(vla.model.parameters()).device)
    if config.memory_size:
        memory = {"frozen": vla, "chunk_len": chunk_len, "history": config.history}
        memory["memory_size"] = config.memory_size
    return _kind(config, student, head, memory), adapters


def _kind(
    config: OnPolicyConfig,
    student: Any,
    head: ValueHead | None = None,
    memory: Mapping[str, Any] | None = None,
) -> VLAPolicy:
    """Return the VLA as a policy that sees what the configuration lets it see."""
    policy: VLAPolicy
    if config.policy == "gaussian":
        scales: Sequence[float] = (1.0,) * student.action_size
        if isinstance(student, MiniBackend):  # others' units are normalised already
            scales = get_suite(config.suite).action.scales
        kind: Any = RecurrentGaussianPolicy if memory else GaussianPolicy
        policy = kind(
            student,
            sigmas=[config.sigma * scale for scale in scales],
            min_sigma=config.min_sigma / config.sigma,
            learn_sigma=config.learn_sigma,
            correlation=config.noise_correlation,
            value_head=head,
            **(memory or {}),
        )
    elif config.policy == "flow":
        policy = FlowPolicy(
            student,
            noise=config.flow_noise,
            stochastic_steps=config.stochastic_steps,
            fixed_start=config.flow_start == "fixed",
            correlation=config.noise_correlation,
            value_head=head,
        )
    elif config.policy == "own":
        policy = OwnPolicy(student, value_head=head)
    else:
        policy = TokenPolicy(
            student,
            temperature=config.temperature,
            correlation=config.noise_correlation,
            value_head=head,
        )
    if config.hidden_cameras:
        policy.hide(config.hidden_cameras)
    return policy


def describe(policy: Policy) -> str:
    """Return how many parameters are trained."""
    return str(count_parameters(nn.ModuleList(policy.networks().values())))


@dataclass
class EnvFactories:
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


def libero_envs(config: OnPolicyConfig, networks: Networks) -> EnvFactories:
    """Return the LIBERO environments that a configuration asks for.

    Raises:
        UnknownTaskError: If there is no such task.
    """
    tasks = config.tasks()
    shared: dict[str, Any] = {
        "workers": config.workers,
        "hosts": config.hosts,
        "task_ids": list(tasks),
        "chunk_len": networks.chunk_len,
        "image_size": networks.policy.image_size,
        "gamma": config.gamma,
        **local_rendering(config.device),
    }

    def train() -> LiberoVectorEnv:
        own: dict[str, Any] = {
            "task_sampling": config.task_sampling,
            "visual_profile": config.visual_profile,
            "group_size": config.group_size,
            "autoreset_mode": "SAME_STEP",
        }
        return make_libero_vec(
            config.suite, config.num_envs, **own, **shared, **config.env_kwargs()
        )

    def evaluation() -> LiberoVectorEnv:
        own: dict[str, Any] = {"autoreset_mode": "DISABLED"}
        return make_libero_vec(config.suite, config.eval_envs, **own, **shared, **config.own_look())

    limit = max(get_task(config.suite, task_id).max_control_steps for task_id in tasks)
    return EnvFactories(train, evaluation, limit, tuple(tasks))
