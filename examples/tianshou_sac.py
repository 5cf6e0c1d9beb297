"""Train Tianshou's SAC: `pip install tianshou==2.0.1`, then this file."""

from typing import Any

import gymnasium as gym
import torch
from tianshou.algorithm import SAC
from tianshou.algorithm.modelfree.sac import SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, CollectStats, VectorReplayBuffer
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic

import vla_gym  # noqa: F401  (registers the environments)
from vla_gym.integrations.tianshou import TianshouVectorEnv


def train(chunks: int = 400, num_envs: int = 2, **options: Any) -> tuple[VectorReplayBuffer, Any]:
    """Collect and learn from so many chunks; return the replay buffer and statistics."""
    torch.set_num_threads(1)
    options = {"task_ids": 8, "assets": "lite", "gamma": 0.99, "flat": True} | options
    env = TianshouVectorEnv(
        gym.make_vec("LiberoVLA-goal-v0", num_envs, autoreset_mode="DISABLED", **options)
    )
    (observation,), action = (env.observation_space[0].shape, env.action_space[0])
    sizes = {"state_shape": observation, "hidden_sizes": [256, 256]}
    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(**sizes),
        action_shape=action.shape,
        unbounded=True,
        conditioned_sigma=True,
    )
    critic = ContinuousCritic(preprocess_net=Net(**sizes, action_shape=action.shape, concat=True))
    algorithm: Any = SAC(
        policy=SACPolicy(actor=actor, action_space=action),
        policy_optim=AdamOptimizerFactory(lr=3e-4),
        critic=critic,
        critic_optim=AdamOptimizerFactory(lr=1e-3),
        # Its time step is a whole chunk of control steps, 7 numbers each.
        gamma=options["gamma"] ** (action.shape[0] // 7),
    )
    buffer = VectorReplayBuffer(20_000, num_envs)
    collector = Collector[CollectStats](algorithm, env, buffer, exploration_noise=True)
    params = OffPolicyTrainerParams(
        training_collector=collector,
        max_epochs=1,
        epoch_num_steps=chunks,
        collection_step_num_env_steps=num_envs,
    )
    result = algorithm.run_training(params)
    env.close()
    return buffer, result


if __name__ == "__main__":
    print(train()[1])
