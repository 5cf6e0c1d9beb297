"""A tiny VLA and the toy environment, put together for the on-policy tests."""

from __future__ import annotations

from functools import partial

import cloudpickle
import numpy as np
import torch
import toy_token_env
from toy_token_env import TEXTS, ToyTokenEnv

from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla.lora import LoraSettings
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym.vla.mini.model import MiniVLA, MiniVLAConfig
from vla_gym.vla.tokens import build_vocabulary
from vla_gym_trainers.on_policy.collector import RolloutCollector
from vla_gym_trainers.on_policy.policy import ValueHead
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.student import trainable_copy
from vla_gym_trainers.on_policy.vla_policy import TokenPolicy

cloudpickle.register_pickle_by_value(toy_token_env)
LORA = LoraSettings(r=4, exclude=("action_head",))


def tiny_vla(seed=0, flow_layers=0):
    torch.manual_seed(seed)
    config = MiniVLAConfig(
        vocabulary=build_vocabulary(TEXTS), hidden_size=32, num_layers=1, flow_layers=flow_layers
    )
    return MiniBackend(MiniVLA(config))


def tiny_policy(value=False, what="lora", seed=0):
    vla = tiny_vla(seed)
    torch.manual_seed(seed + 1)
    head = ValueHead(vla.hidden_size, 16) if value else None
    return TokenPolicy(trainable_copy(vla, what, lora=LORA)[0], value_head=head)


def toy_envs(num_envs=4, workers=0, group_size=1, autoreset_mode="SAME_STEP", **kwargs):
    return LiberoVectorEnv(
        num_envs,
        env_factory=partial(ToyTokenEnv, group_size=group_size, **kwargs),
        workers=workers,
        group_size=group_size,
        autoreset_mode=autoreset_mode,
    )


def toy_rollout(num_envs=4, episodes=2, num_chunks=5, group_size=1, *, policy=None, first_env=0):
    sizes = num_envs, num_chunks, episodes
    return Rollout(policy or tiny_policy(), *sizes, group_size=group_size, first_env=first_env)


def random_targets(rollout, seed=0):
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(rollout.data.shape, generator=generator)
    returns = torch.rand(rollout.data.shape, generator=generator)
    return advantages, rollout.data["valid"], returns


def rollouts_of(policy, sizes, actor=None, *, times=1, groups=1, seed=100, **toy):
    """Rollouts one after the other on the same environments, by the policy or another actor."""
    envs = toy_envs(sizes.get("num_envs", 4), group_size=sizes.get("group_size", 1), **toy)
    try:
        collector = RolloutCollector(envs, groups=groups)
        outs = [toy_rollout(**sizes, policy=policy) for _ in range(times)]
        return [
            collector.collect(actor or policy, out, seed=seed + 100 * i)
            for i, out in enumerate(outs)
        ]
    finally:
        envs.close()


def collected(policy, actor=None, *, num_envs=4, episodes=2, seed=7):
    """A rollout of whole episodes of the toy."""
    (rollout,) = rollouts_of(policy, {"num_envs": num_envs, "episodes": episodes}, actor, seed=seed)
    return rollout


def keys_of(count):
    """Keys of the draws of so many rows."""
    return np.array([[5, 0, n] for n in range(count)])


def shuffled(rollout):
    """The same with a teacher's samples: those of other rows."""
    rollout.data["teacher_sample"].copy_(rollout.data["sample"].flip(0))
    return rollout
