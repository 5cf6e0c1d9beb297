"""A tiny VLA and the toy environment, put together for the on-policy tests."""

import copy
from contextlib import closing
from functools import partial

import cloudpickle
import numpy as np
import torch
import toy_token_env
from toy_token_env import LIMIT, TEXTS, ToyTokenEnv

from vla_gym.rollout import rollout
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla.lora import LoraSettings
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym.vla.mini.model import MiniVLA, MiniVLAConfig
from vla_gym.vla.tokens import build_vocabulary
from vla_gym_trainers.on_policy.collector import RolloutCollector
from vla_gym_trainers.on_policy.networks import EnvFactories
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


def toy_envs(
    num_envs=4, workers=0, group_size=1, autoreset_mode="SAME_STEP", kind=ToyTokenEnv, **kwargs
):
    return LiberoVectorEnv(
        num_envs,
        env_factory=partial(kind, group_size=group_size, **kwargs),
        workers=workers,
        group_size=group_size,
        autoreset_mode=autoreset_mode,
    )


def toy_factories(config, **toy):
    """What a run of these settings trains and evaluates on."""
    toy = {"tasks": (0, 1), "goal": 0.2, **toy}  # chance reaches 0.2 now and then
    return EnvFactories(
        lambda: toy_envs(config.num_envs, group_size=config.group_size, **toy),
        lambda: toy_envs(config.eval_envs, autoreset_mode="DISABLED", **toy),
        LIMIT,
        toy["tasks"],
    )


def toy_rollout(num_envs=4, episodes=2, num_chunks=5, group_size=1, *, policy=None, first_env=0):
    sizes = num_envs, num_chunks, episodes
    return Rollout(policy or tiny_policy(), *sizes, group_size=group_size, first_env=first_env)


def part_of(rollout, rows=slice(None)):
    """A copy of some of its rows, to be changed."""
    part = copy.copy(rollout)
    part.data = rollout.data[rows].clone()
    return part


def random_targets(rollout, seed=0):
    generator = torch.Generator().manual_seed(seed)
    advantages = torch.randn(rollout.data.shape, generator=generator)
    returns = torch.rand(rollout.data.shape, generator=generator)
    return advantages, rollout.data["valid"], returns


def rollouts_of(policy, sizes, actor=None, *, times=1, groups=1, seed=100, **toy):
    """Rollouts one after the other on the same environments, by the policy or another actor."""
    num_envs, group_size = sizes.get("num_envs", 4), sizes.get("group_size", 1)
    with closing(toy_envs(num_envs, group_size=group_size, **toy)) as envs:
        collector = RolloutCollector(envs, groups=groups)
        outs = [toy_rollout(**sizes, policy=policy) for _ in range(times)]
        return [
            collector.collect(actor or policy, out, seed=seed + 100 * i)
            for i, out in enumerate(outs)
        ]


def collected(policy, actor=None, *, num_envs=4, episodes=2, seed=7):
    """A rollout of whole episodes of the toy."""
    (rollout,) = rollouts_of(policy, {"num_envs": num_envs, "episodes": episodes}, actor, seed=seed)
    return rollout


def chunks_of(player, envs, starts):
    """Let it play; its chunks by task, seed and control step, and the episodes."""
    chunks, act = {}, player.act

    def spy(observations, infos):
        chosen = act(observations, infos)
        for info, chunk in zip(infos, chosen, strict=True):
            chunks[info["task_id"], info["seed"], info["elapsed_steps"]] = chunk
        return chosen

    player.act = spy
    with closing(envs):
        return chunks, list(rollout(envs, player, starts))


def keys_of(count):
    """Keys of the draws of so many rows."""
    return np.array([[5, 0, n] for n in range(count)])


def shuffled(rollout):
    """The same with a teacher's samples: those of other rows."""
    rollout.data["teacher_sample"].copy_(rollout.data["sample"].flip(0))
    return rollout


def moved(policy, state):
    """Names of parameters that differ from a state."""
    return {k for k, v in policy.state_dict().items() if not torch.equal(v, state[k])}
