"""Train skrl's SAC: `pip install skrl==2.1.1`, then this file."""

from typing import Any

import gymnasium as gym
import torch
from skrl.agents.torch.sac import SAC
from skrl.memories.torch import RandomMemory
from skrl.trainers.torch import SequentialTrainer
from skrl.utils.model_instantiators.torch import deterministic_model, gaussian_model

import vla_gym  # noqa: F401  (registers the environments)
from vla_gym.integrations.skrl import use_final_obs, wrap_env


def train(chunks: int = 400, num_envs: int = 2, **options: Any) -> SAC:
    """Collect and learn from so many chunks; options are those of the environment."""
    torch.set_num_threads(1)
    options = {"task_ids": 8, "assets": "lite", "gamma": 0.99, "flat": True} | options
    envs = gym.make_vec("LiberoVLA-goal-v0", num_envs, autoreset_mode="SAME_STEP", **options)
    env = wrap_env(envs)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    layers = {"layers": [256, 256], "activations": "relu"}
    network = [{"name": "net", "input": "OBSERVATIONS", **layers}]
    models = {
        "policy": gaussian_model(
            **spaces, network=network, output="tanh(ACTIONS)", clip_actions=True
        )
    }
    network = [{"name": "net", "input": "concatenate([OBSERVATIONS, ACTIONS])", **layers}]
    for name in ("critic_1", "critic_2", "target_critic_1", "target_critic_2"):
        models[name] = deterministic_model(**spaces, network=network, output="ONE")
    # Its time step is a whole chunk of control steps, 7 numbers each.
    gamma = options["gamma"] ** (env.action_space.shape[0] // 7)
    cfg = {"discount_factor": gamma, "learning_starts": 10}
    memory = RandomMemory(memory_size=20_000 // num_envs, num_envs=num_envs)
    agent = use_final_obs(SAC(models=models, memory=memory, cfg=cfg, **spaces))
    steps = {"timesteps": chunks // num_envs, "headless": True}
    SequentialTrainer(cfg=steps, env=env, agents=agent).train()
    env.close()
    return agent


if __name__ == "__main__":
    train()
