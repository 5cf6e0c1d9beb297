"""Every backend in LIBERO: tiny checkpoints, through to stable-baselines3."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vla_checkpoints import NAMES, backend_and_folder

from vla_gym.rl_token import RLTokenEncoder, RLTokenModelConfig
from vla_gym.vla import load

pytest.importorskip("stable_baselines3")

from vla_gym_trainers.runs.sb3_vec_env import make_sb3_vec_env  # noqa: E402

pytestmark = pytest.mark.slow

CHUNKS, ENVS, DIM = 20, 2, 16


@pytest.mark.parametrize("name", NAMES)
def test_twenty_chunks_of_two_tasks_through_sb3(name, checkpoints):
    spec = "{}:{}".format(*backend_and_folder(name, checkpoints))
    vla = load(spec)
    torch.manual_seed(0)
    sizes = RLTokenModelConfig(vla.hidden_size, vla.num_hidden_tokens, dim=DIM, width=16)
    env = make_sb3_vec_env(
        "LiberoVLA-goal-v0",
        ENVS,
        seed=0,
        vla=spec,
        rl_token=RLTokenEncoder(sizes).eval(),
        task_ids=[1, 7],
        max_control_steps=12 * vla.horizon,
        gamma=0.99,
        assets="lite",
        workers=0,
    )
    ends = successes = 0
    try:
        obs = env.reset()
        first = {key: value.copy() for key, value in obs.items()}
        for _ in range(CHUNKS):
            assert obs["rl_token"].shape == (ENVS, DIM)
            assert obs["vla_action"].shape == (ENVS, vla.horizon, 7)
            assert all(np.isfinite(value).all() for value in obs.values())
            assert np.abs(obs["vla_action"]).max() <= 1.0
            obs, rewards, dones, infos = env.step(obs["vla_action"])
            for reward, done, info in zip(rewards, dones, infos, strict=True):
                assert info["executed_steps"] == vla.horizon or done
                assert info["discount"] == pytest.approx(0.99 ** info["executed_steps"])
                if done:
                    ends += 1
                    successes += int(reward > 0.0)
                    assert info["TimeLimit.truncated"] == (reward == 0.0)
                    assert info["terminal_observation"]["rl_token"].shape == (DIM,)
        # Each episode ends once, after twelve chunks; one that succeeds by chance makes room.
        assert ENVS <= ends <= ENVS + successes
        # What the policy saw moved, and so did its states.
        assert not np.array_equal(obs["proprio"], first["proprio"])
        assert not np.array_equal(obs["rl_token"], first["rl_token"])
        env.seed(0)
        again = env.reset()
        for key, value in first.items():
            np.testing.assert_allclose(again[key], value, rtol=0, atol=1e-5)
    finally:
        env.close()
