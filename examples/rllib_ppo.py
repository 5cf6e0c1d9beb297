"""Train RLlib's PPO: `pip install "ray[rllib]==2.60.0" gymnasium==1.2.2`, then this file."""

from typing import Any

import torch
from ray.rllib.algorithms.ppo import PPO, PPOConfig


def train(chunks: int = 400, num_envs: int = 2, **options: Any) -> PPO:
    """Collect and learn from so many chunks; options are those of the environment."""
    torch.set_num_threads(1)
    defaults = {"task_ids": 8, "assets": "lite", "gamma": 0.99, "flat": True, "chunk_len": 8}
    options = defaults | options
    gamma = options["gamma"] ** options["chunk_len"]  # its time step is a whole chunk
    batch = 20 * num_envs
    config = (
        PPOConfig()
        .environment("vla_gym:LiberoVLA-goal-v0", env_config=options | {"string_infos": False})
        .env_runners(
            num_env_runners=0,  # in this process; more are processes with a VLA each
            num_envs_per_env_runner=num_envs,
            gym_env_vectorize_mode="vector_entry_point",
            rollout_fragment_length=20,
        )
        .training(train_batch_size_per_learner=batch, minibatch_size=20, gamma=gamma)
    )
    algorithm = config.build_algo()
    for _ in range(-(-chunks // batch)):
        print(algorithm.train()["env_runners"].get("episode_return_mean"))
    return algorithm


if __name__ == "__main__":
    train().stop()
