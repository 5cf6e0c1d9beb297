"""Train sbx's SAC (JAX): `pip install sbx-rl==0.28.0`, then this file."""

from typing import Any

import torch
from sbx import SAC

from vla_gym_trainers import make_sb3_vec_env


def train(chunks: int = 400, num_envs: int = 2, **options: Any) -> SAC:
    """Collect and learn from so many chunks; options are those of the environment."""
    torch.set_num_threads(1)
    options = {"task_ids": 8, "assets": "lite", "gamma": 0.99, "flat": True} | options
    env = make_sb3_vec_env("LiberoVLA-goal-v0", num_envs, **options)
    # One of its time steps is a whole chunk of control steps, 7 numbers each.
    gamma = options["gamma"] ** (env.action_space.shape[0] // 7)
    model = SAC("MlpPolicy", env, gamma=gamma, learning_starts=20, buffer_size=20_000, verbose=1)
    model.learn(chunks)
    env.close()
    return model


if __name__ == "__main__":
    train()
