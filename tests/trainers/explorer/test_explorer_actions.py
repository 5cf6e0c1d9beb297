"""An explorer beside another policy: its chunks, its memory in saved states, TD3's warm-up."""

import numpy as np
import pytest
import torch
from explorer_toys import SMALL
from on_policy_toys import tiny_vla, toy_envs
from td3_toys import td3_bc
from toy_token_env import TEXTS

from vla_gym.errors import ConfigError
from vla_gym.rollout.policies import Info
from vla_gym.wrappers.vector import FrozenVLAObservation
from vla_gym_trainers.explorer.actions import ExplorerActions
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.networks import make_networks
from vla_gym_trainers.on_policy.validation import PolicyPlayer
from vla_gym_trainers.td3.config import TD3RunConfig


def shown(step, change="none", seed=0):
    """Two rows of two episodes at a step, with one camera's picture turned to its negative."""
    rng = np.random.default_rng([seed, step])
    views = ("agentview", "wrist")
    seen = {name: rng.integers(0, 256, (2, 64, 64, 3), dtype=np.uint8) for name in views}
    seen = {k: 255 - v if k == change else v for k, v in seen.items()}
    seen |= {"proprio": np.zeros((2, 8), np.float32), "task_id": np.zeros(2, np.int64)}
    infos = [
        Info(
            env_id=i,
            suite="goal",
            task_id=0,
            init_state_id=-1,
            seed=i,
            instruction=TEXTS[0],
            elapsed_steps=4 * step,
        )
        for i in range(2)
    ]
    return seen, infos


def explorer(seed=3):
    settings = {k: v for k, v in SMALL.items() if k != "compare_episodes"}
    hidden = {"policy": "gaussian", "hidden_cameras": ("agentview",), "chunk_len": 4}
    networks = make_networks(PPOConfig(**settings, **hidden), tiny_vla())
    # As if it had learnt: at the start what is remembered moves nothing.
    torch.nn.init.normal_(networks.policy.memory.out.weight, generator=torch.manual_seed(5))
    return PolicyPlayer(networks.policy.act, networks.policy, networks.chunk_len, seed)


def exploring(share=1.0):
    return ExplorerActions(toy_envs(2, size=128), explorer(), share)


def steps(envs, count, chunks=None):
    """Step by the explorer's chunks; return them."""
    found = []
    for _ in range(count):
        found.append(envs.explore(np.zeros((2, 4, 7), np.float32), np.arange(2)))
        envs.step(found[-1])
    return np.array(found)


def test_chunks_are_the_explorers_with_its_memory():
    envs = exploring()
    envs.reset(seed=5)
    found = steps(envs, 3)
    assert found.shape == (3, 2, 4, 7) and np.abs(found).max() <= 1.0
    assert (found[0, 0] != found[0, 1]).any() and (found[0] != found[1]).any()
    again = exploring()
    again.reset(seed=5)
    assert (steps(again, 3) == found).all()
    carried = envs.explorer.memory.rows([0, 1])
    assert carried["memory"].any() and (carried["previous_action"] == found[2]).all()
    for wrapped in (envs, again):
        wrapped.close()


def test_an_episode_begins_without_memory():
    envs = exploring()
    envs.reset(seed=5)
    steps(envs, 5)  # 20 control steps are the limit: the next one is an episode's first
    assert (envs._counts[:, 1] == 0).all() and (envs._counts[:, 0] == 2).all()
    fresh = exploring()
    fresh.reset(seed=5)
    for key, rows in envs._seen.items():
        fresh._seen[key][:] = rows
    fresh._texts[:], fresh._counts[:] = envs._texts, envs._counts
    zeros = np.zeros((2, 4, 7), np.float32)
    assert (envs.explore(zeros, np.arange(2)) == fresh.explore(zeros, np.arange(2))).all()
    envs.close()
    fresh.close()


def test_a_share_of_the_environments_explores():
    envs, given = exploring(0.5), np.full((2, 4, 7), 0.25, np.float32)
    envs.reset(seed=5)
    found = envs.explore(given, np.arange(2))
    assert (found[1] == 0.25).all() and (found[0] != 0.25).any() and (given == 0.25).all()
    assert (envs.explore(given[1:], np.array([1])) == 0.25).all()
    envs.close()
    for share, count in ((0.1, 1), (0.0, 0)):  # a share explores, however few there are
        few = exploring(share)
        few.reset(seed=5)
        assert ((few.explore(given, np.arange(2)) != 0.25).any(axis=(1, 2)).sum()) == count
        few.close()


def test_saved_states_hold_the_explorers_memory():
    envs = toy_envs(2, size=128)
    envs.get_state = envs.set_state = lambda *_: [None, None]  # states that say nothing
    wrapped = ExplorerActions(envs, explorer())
    wrapped.reset(seed=5)
    steps(wrapped, 2)
    states = wrapped.get_state()
    expected = wrapped.explore(np.zeros((2, 4, 7), np.float32), np.arange(2))
    other = ExplorerActions(envs, explorer())
    other.set_state(states)
    assert (other.explore(np.zeros((2, 4, 7), np.float32), np.arange(2)) == expected).all()
    with pytest.raises(ConfigError, match="a state of ExplorerActions, got int"):
        other.set_state([1, 2])
    envs.close()


def test_td3s_warm_up_plays_the_explorer_and_then_the_actor():
    wrapped = ExplorerActions(toy_envs(2, size=128), explorer())
    envs = FrozenVLAObservation(wrapped, tiny_vla(), rl_token=None, chunk_len=None)
    asked = []
    explore = ExplorerActions.explore

    def counting(self, actions, ids):
        asked.append(explore(self, actions, ids))
        return asked[-1]

    wrapped.explore = counting.__get__(wrapped)
    model = td3_bc(envs, learning_starts=8, train_freq=2, buffer_size=64).learn(16)
    assert len(asked) == 4, "8 chunks of two environments"
    buffer = model.replay_buffer
    stored = buffer.actions[:16].reshape(-1, 2, 4, 7)
    np.testing.assert_array_equal(stored[:4], np.array(asked))
    envs.close()


def test_bad_settings_are_one_clear_error():
    with pytest.raises(ConfigError, match="chunks of 4 on images of 128.*32, 32"):
        ExplorerActions(toy_envs(2, size=32), explorer())
    with pytest.raises(ConfigError, match="explore_with plays whole chunks on this machine"):
        TD3RunConfig(explore_with="run", stride=2)
    with pytest.raises(ConfigError, match="explore_share: expected `float` <= 1.0, got 1.5"):
        TD3RunConfig(explore_share=1.5)
    with pytest.raises(ConfigError, match="explore_share: expected 1 without explore_with, got 0"):
        TD3RunConfig(explore_share=0.5)
