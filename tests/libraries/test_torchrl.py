"""TorchRL: its example trains, and its replay buffer is right."""

import gymnasium as gym
import numpy as np
import pytest
from episode_clock import FLAT, OPTIONS, check_transitions

pytest.importorskip("torchrl", reason="torchrl is not installed")


def test_replay():
    from examples.torchrl_sac import train

    buffer, loss = train(60, **FLAT)
    data = buffer[:]
    assert len(data) == 60 and np.isfinite(loss)
    after = data["next"]
    check_transitions(
        data["observation"],
        after["observation"],
        after["reward"],
        after["terminated"],
        after["truncated"],
    )
    # The infos of the step, not of the reset that may follow it.
    np.testing.assert_allclose(after["discount"].flatten(), 0.99**8)
    np.testing.assert_array_equal(after["success"].flatten(), after["terminated"].flatten())


def test_an_observation_of_several_entries():
    """No flat=True is needed: GymWrapper takes the Dict, the collector resets what has ended."""
    from torchrl.collectors import Collector
    from torchrl.envs import GymWrapper

    settings = OPTIONS | {"gamma": 0.99, "string_infos": False, "autoreset_mode": "DISABLED"}
    env = GymWrapper(gym.make_vec("LiberoVLA-goal-v0", 2, **settings)).auto_register_info_dict()
    collector = Collector(env, None, frames_per_batch=24, total_frames=24)
    (data,) = collector
    data = data.reshape(-1)
    assert data["rl_token"].shape == (24, 256) and data["action"].shape == (24, 8, 7)
    after = data["next"]
    check_transitions(
        data["clock"], after["clock"], after["reward"], after["terminated"], after["truncated"]
    )
    collector.shutdown()


def test_a_td3_replay_in_torchrls_buffer():
    """Its keys are those of a collector: a loss of TorchRL's reads them, and bootstraps rightly."""
    import torch
    from tensordict.nn import TensorDictModule
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.objectives.value import TD0Estimator

    from vla_gym_trainers import TD3BC, TD3Config, make_sb3_vec_env
    from vla_gym_trainers.td3.tensordicts import replay_tensordict

    env = make_sb3_vec_env("LiberoVLA-goal-v0", 2, gamma=0.99, **OPTIONS)
    model = TD3BC("RLTokenPolicy", env, TD3Config(gamma=0.99, learning_starts=100), seed=0)
    model.learn(40)
    data = replay_tensordict(model.replay_buffer)
    env.close()
    after = data["next"]
    check_transitions(
        data["clock"], after["clock"], after["reward"], after["terminated"], after["truncated"]
    )
    buffer = ReplayBuffer(storage=LazyTensorStorage(len(data)), batch_size=len(data))
    buffer.extend(data)
    ones = TensorDictModule(
        lambda clock: torch.ones_like(clock[..., :1]), ["clock"], ["state_value"]
    )
    target = TD0Estimator(gamma=0.5, value_network=ones).value_estimate(buffer[:])
    expected = after["reward"] + 0.5 * (~after["terminated"]).float()
    torch.testing.assert_close(target, expected)
