"""Collectors: what is in a rollout equals what was played, in every way of collecting it."""

from contextlib import closing

import numpy as np
import pytest
import torch
from on_policy_toys import rollouts_of, tiny_policy, toy_envs, toy_rollout
from toy_token_env import GAMMA, LIMIT, TEXTS, ToyTokenEnv

from vla_gym.errors import ConfigError, WorkerRestartWarning
from vla_gym_trainers.on_policy.collector import RolloutCollector


def replay(rollout, row, index, seed, episodes, group_size=1):
    """Play a row's episodes again in a single environment, by its tokens, and compare all of it."""
    data, policy = rollout.data[row], tiny_policy()
    env = ToyTokenEnv(index, group_size=group_size)
    obs, info = env.reset(seed=seed)
    for _ in range(episodes):
        obs, info = env.reset()
    over = False
    for t in range(rollout.num_chunks):
        slot = data[t]
        if not slot["valid"]:
            assert over and rollout.episodes is not None
            return
        if over:
            obs, info = env.reset()
        for key in ("agentview", "wrist", "proprio"):
            np.testing.assert_array_equal(slot[key].numpy(), obs[key])
        assert rollout.texts(slot["instruction"][None]) == [info["instruction"]]
        assert slot["task_id"] == obs["task_id"]
        actions = policy.vla.tokens_to_actions(slot["sample"].long())[:4].numpy()
        obs, reward, terminated, truncated, info = env.step(actions)
        over = terminated or truncated
        assert slot["rewards"] == np.float32(reward)
        assert (slot["terminated"], slot["truncated"]) == (terminated, truncated)
        assert slot["executed"] == info["executed_steps"]
        assert slot["discounts"].item() == pytest.approx(GAMMA ** info["executed_steps"])


def test_whole_episodes_are_what_was_played():
    policy = tiny_policy(value=True)
    torch.nn.init.normal_(policy.value_head.fc2.weight)
    first, second = rollouts_of(policy, {"num_envs": 3}, times=2, groups=2)
    for rollout, seed in ((first, 100), (second, 200)):
        assert rollout.ended.sum(dim=1).tolist() == [1] * 6
        assert set(rollout.instructions) <= set(TEXTS)
        for row in range(6):
            replay(rollout, row, row // 2, seed + row // 2, row % 2)
    check_log_probs_and_values(policy, first)
    assert first.seconds["rollout"] >= first.seconds["forward"] > 0


def check_log_probs_and_values(policy, rollout):
    data = rollout.data
    valid = data["valid"]
    chosen = data[valid]
    observation = {key: chosen[key].numpy() for key in rollout.observation}
    with torch.no_grad():
        inputs = observation, rollout.texts(chosen["instruction"])
        log_probs = policy.distribution(*inputs)[0].log_prob(chosen["sample"])
        values = policy.values(*inputs)
    torch.testing.assert_close(chosen["log_probs"], log_probs, atol=2e-6, rtol=0)
    torch.testing.assert_close(chosen["values"], values, atol=2e-6, rtol=0)
    follows = valid[:, :-1] & valid[:, 1:] & ~(data["terminated"] | data["truncated"])[:, :-1]
    assert torch.equal(data["next_values"][:, :-1][follows], data["values"][:, 1:][follows])
    # Where no chunk follows in the row, the value of the last observation; 0 after success.
    last = valid & ~torch.cat([follows, torch.zeros(len(valid), 1, dtype=torch.bool)], dim=1)
    bootstraps = data["next_values"][last & ~data["terminated"]]
    assert len(bootstraps) and bootstraps.abs().min() > 0
    assert not data["next_values"][data["terminated"]].any()


def test_rows_of_fixed_length_go_on_where_the_last_one_stopped():
    policy = tiny_policy(value=True)
    torch.nn.init.normal_(policy.value_head.fc2.weight)
    sizes = {"num_envs": 3, "episodes": None}
    short = rollouts_of(policy, {**sizes, "num_chunks": 7}, times=3)
    (long,) = rollouts_of(policy, {**sizes, "num_chunks": 21})
    assert all(rollout.data["valid"].all() for rollout in (*short, long))
    joined = torch.cat([rollout.data for rollout in short], dim=1)
    for key in ("proprio", "sample", "rewards", "terminated", "truncated", "executed", "values"):
        assert torch.equal(joined[key], long.data[key]), key
    for row in range(3):
        replay(long, row, row, 100 + row, 0)
    for rollout in short:
        check_log_probs_and_values(policy, rollout)
    # Bootstraps at the seams equal what the longer row goes on with.
    seam = long.data[:, 6]
    inner = ~(seam["terminated"] | seam["truncated"])
    torch.testing.assert_close(
        short[0].data["next_values"][:, 6][inner], seam["next_values"][inner], atol=2e-6, rtol=0
    )


def test_the_policys_draws_are_not_those_of_the_layout():
    policy, keys = tiny_policy(), []
    act = policy.act
    policy.act = lambda rows, texts, found: keys.extend(found) or act(rows, texts, found)
    rollouts_of(policy, {"num_envs": 2})
    drawn = {float(np.random.default_rng(key).random()) for key in keys}
    layouts = {float(np.random.default_rng([s, e]).random()) for s in (100, 101) for e in (0, 1)}
    assert len(drawn) == len(keys) and not drawn & layouts


def test_groups_begin_in_the_same_state():
    (rollout,) = rollouts_of(tiny_policy(), {"group_size": 2, "first_env": 4}, seed=200)
    groups = rollout.data["group"][:, 0]
    # Environments 4..7 of two episodes each: (env // 2) * 2 + episode.
    assert groups.tolist() == [4, 5, 4, 5, 6, 7, 6, 7]
    starts = rollout.data["proprio"][:, 0, 0]
    for group in groups.unique():
        assert starts[groups == group].unique().numel() == 1
    assert starts.unique().numel() == 4
    tokens = rollout.data["sample"][:, 0]
    assert not torch.equal(tokens[0], tokens[2])  # the members act differently


def test_same_seed_same_rollout_whatever_the_workers():
    policy = tiny_policy()
    (one,), (other,) = rollouts_of(policy, {}), rollouts_of(policy, {}, groups=2, workers=2)
    for key in ("sample", "rewards", "proprio", "executed", "valid"):
        mask = one.data["valid"]
        assert torch.equal(other.data[key][mask], one.data[key][mask]), key


def test_a_transition_lost_with_its_worker_is_not_valid(tmp_path):
    policy, sizes = tiny_policy(), {"num_envs": 2}
    kwargs = {"workers": 1, "die_in": (0, str(tmp_path / "died"))}
    with pytest.warns(WorkerRestartWarning):
        (rollout,) = rollouts_of(policy, sizes, **kwargs)
    (whole,) = rollouts_of(policy, sizes)
    complete = rollout.ended.any(dim=1)
    assert complete.tolist() in ([False, True, False, True], [False, True, True, True])
    for row in complete.nonzero()[:, 0].tolist():
        assert torch.equal(rollout.data["sample"][row], whole.data["sample"][row])
    lost = rollout.data[0]
    assert lost["valid"].sum() == 1 and not lost["rewards"].any()


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="longer than the 3 chunks of a row: make"):
        rollouts_of(tiny_policy(), {"num_chunks": 3})
    assert LIMIT > 3 * 4
    with closing(toy_envs(2)) as envs, pytest.raises(ConfigError, match="of 2 environments, got 4"):
        RolloutCollector(envs).collect(tiny_policy(), toy_rollout(4), seed=0)
