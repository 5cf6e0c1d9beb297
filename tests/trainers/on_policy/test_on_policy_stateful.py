"""A stateful VLA below the RL-token policy of PPO and GRPO, and where it cannot be trained."""

from functools import partial

import numpy as np
import pytest
import torch
from memory_vla import GRUVLA
from on_policy_toys import chunks_of, tiny_vla, toy_envs
from run_logs import assert_goes_on, rows_of
from test_on_policy_rl_token import SMALL
from test_on_policy_train import run

from vla_gym.errors import ConfigError
from vla_gym.rollout import Start
from vla_gym.wrappers.vector import FrozenVLAObservation
from vla_gym_trainers.on_policy.collector import RolloutCollector
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.networks import make_networks
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.validation import PolicyPlayer
from vla_gym_trainers.td3.algorithm_config import TD3Config
from vla_gym_trainers.td3.finetune import VLAFineTuner


def memory_vla():
    return GRUVLA(tiny_vla(), row_by_row=True)


@pytest.fixture
def policy():
    policy = make_networks(PPOConfig(**{**SMALL, "chunk_len": 4}), memory_vla()).policy
    torch.manual_seed(3)
    torch.nn.init.normal_(policy.value_head.head.fc2.weight)
    return policy


def test_a_rollout_sees_what_the_wrapped_environments_show(policy):
    """Two rollouts of rows that go on, over several ends; final observations are valued, too."""
    envs = toy_envs(4)
    collector, parts = RolloutCollector(envs, groups=2), []
    for _ in range(2):
        out = collector.collect(policy, Rollout(policy, 4, 8, None), seed=3)
        parts.append({key: value.numpy().copy() for key, value in out.data.items()})
    envs.close()
    data = {key: np.concatenate([part[key] for part in parts], axis=1) for key in parts[0]}
    wrapped = FrozenVLAObservation(toy_envs(4), policy.vla, rl_token=None)
    obs, infos = wrapped.reset(seed=3)
    ends = 0
    for slot in range(16):
        for key in ("rl_token", "vla_action", "proprio", "task_id"):
            np.testing.assert_array_equal(data[key][:, slot], obs[key], err_msg=f"{key}, {slot}")
        chunks = policy.actions(torch.from_numpy(data["sample"][:, slot]), obs)
        obs, _, _, truncations, infos = wrapped.step(chunks.clamp(-1, 1).numpy())
        np.testing.assert_array_equal(data["truncated"][:, slot], truncations)
        for i in np.flatnonzero(truncations):
            final = {key: value[None] for key, value in infos["final_obs"][i].items()}
            value = policy.values(final, ["x"]).item()
            assert data["next_values"][i, slot] == pytest.approx(value, rel=1e-5)
            ends += 1
    wrapped.close()
    assert ends >= 6 and data["truncated"][:, :8].any() and data["truncated"][:, 8:].any()


def test_whole_episodes_begin_with_a_fresh_state(policy):
    envs = toy_envs(2)
    collector = RolloutCollector(envs)
    for seed in (5, 6):
        out = collector.collect(policy, Rollout(policy, 2, 5, 3), seed=seed)
        first = {key: value[:, 0].numpy() for key, value in out.data.items()}
        # The toy's frames are a function of its position, which proprio holds.
        level = np.clip(128 + 100 * first["proprio"][:, 0], 0, 255).astype(np.uint8)
        frames = np.broadcast_to(level[:, None, None, None], (6, 64, 64, 3))
        seen = {"agentview": frames, "wrist": frames}
        texts = out.texts(torch.from_numpy(first["instruction"]))
        fresh = policy.vla.infer(seen, texts, first["proprio"])
        np.testing.assert_allclose(first["rl_token"], fresh.hidden.mean(dim=1), atol=1e-6)
        later = out.data["rl_token"][:, 1][out.data["valid"][:, 1]].numpy()
        assert np.abs(later - first["rl_token"][: len(later)]).max() > 1e-3
    envs.close()


def test_validation_plays_the_same_in_any_number_of_environments(policy):
    starts = [Start("goal", task, -1, seed) for task in (0, 1) for seed in range(3)]
    one, four = (
        chunks_of(
            PolicyPlayer(policy.act, policy, 4), toy_envs(n, autoreset_mode="DISABLED"), starts
        )[0]
        for n in (1, 4)
    )
    assert one.keys() == four.keys() and len(one) > 12
    for key, chunk in one.items():
        np.testing.assert_array_equal(four[key], chunk)
    # By hand, through the wrapper.
    envs = FrozenVLAObservation(toy_envs(1, autoreset_mode="DISABLED"), policy.vla, rl_token=None)
    obs, infos = envs.reset(seed=2, options={"task_id": 1})
    for steps in (0, 4, 8):
        chunk = policy.act(obs, infos["instruction"].tolist()).actions.numpy()
        np.testing.assert_allclose(one[1, 2, steps], chunk[0], atol=1e-5)
        obs, *_, infos = envs.step(chunk)
    envs.close()


def test_a_run_with_validation_resumes_bit_for_bit(tmp_path):
    changes = {**SMALL, "eval_every": 300, "sigma": 0.3}
    changes |= {"checkpoint_every": 150, "total_steps": 500}
    whole = assert_goes_on(partial(run, PPOConfig, vla=memory_vla()), tmp_path, **changes)
    assert rows_of(whole)[0]["eval/gap"] == 0.0  # it begins at the VLA


def test_what_trains_the_vla_itself_refuses_a_state():
    vla = memory_vla()
    with pytest.raises(ConfigError, match="has a state and cannot be trained with --policy tokens"):
        make_networks(PPOConfig(policy="tokens"), vla)
    envs = FrozenVLAObservation(toy_envs(1), vla, rl_token=None, keep_inputs=True)
    with pytest.raises(ConfigError, match="has a state and cannot be trained through the RL token"):
        VLAFineTuner(envs, TD3Config())
    envs.close()
