"""A VLA that does not see all cameras and remembers: what it sees, carries and learns."""

import numpy as np
import pytest
import torch
from mini_vla import random_inputs
from on_policy_toys import collected, keys_of, moved, random_targets, tiny_vla
from test_on_policy_train import SMALL, run

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.minibatches import gather
from vla_gym_trainers.on_policy.networks import make_networks
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.recurrence import recompute, with_memory
from vla_gym_trainers.on_policy.recurrent_vla import FEATURES, ViewMemory
from vla_gym_trainers.rollout.memory import MEMORY, PREVIOUS_ACTION

BLIND = {
    **SMALL,
    "policy": "gaussian",
    "hidden_cameras": ("agentview",),
    "sigma": 0.3,
    "chunk_len": 4,
    "memory_size": 8,
    "history": 3,
    "bptt_length": 4,
}


def blind(**changes):
    policy = make_networks(PPOConfig(**{**BLIND, **changes}), tiny_vla()).policy
    if hasattr(policy, "memory"):  # as if it had learnt already
        torch.nn.init.normal_(policy.memory.out.weight, generator=torch.manual_seed(5))
    return policy


def seen_by(policy, frames, texts, proprio):
    told = {**frames, "proprio": proprio, "task_id": np.zeros(len(proprio), np.int64)}
    carried = {name: np.zeros((len(proprio), *shape)) for name, shape in policy.carried.items()}
    seen = policy.observe(told, texts)
    return {**seen, **{name: value.astype(np.float32) for name, value in carried.items()}}


@pytest.mark.parametrize("changes", [{}, {"memory_size": 0, "history": 1}])
def test_what_is_hidden_changes_nothing_and_what_is_seen_does(changes):
    policy, (frames, texts, proprio) = blind(**changes), random_inputs(3)
    assert "agentview" not in policy.observation
    acts = {}
    for name in ("none", "agentview", "wrist"):
        shown = {k: 255 - v if k == name else v for k, v in frames.items()}
        acts[name] = policy.act(seen_by(policy, shown, texts, proprio), texts, keys_of(3)).actions
    assert torch.equal(acts["agentview"], acts["none"])
    assert not torch.equal(acts["wrist"], acts["none"])


def test_hiding_cameras_that_are_not_there_is_one_clear_error():
    for hidden in (("front",), ("agentview", "wrist")):
        with pytest.raises(ConfigError, match="some, not all, of the VLA's cameras"):
            blind(hidden_cameras=hidden)
    with pytest.raises(ConfigError, match="policy tokens sees all cameras"):
        PPOConfig(hidden_cameras=("agentview",))
    with pytest.raises(ConfigError, match="history is of the memory of policy gaussian"):
        PPOConfig(policy="gaussian", history=2)


def test_a_memory_holds_the_last_views_and_begins_at_zero():
    memory = ViewMemory(features=2, action=1, chunk=(8, 7), hidden=3, history=3)
    state, previous = torch.zeros(1, memory.size), torch.zeros(1, 1)
    assert memory.size == 3 + 2 * 2
    # A layer norm makes +1 and -1 of two numbers, the greater one first or last.
    for view, last in (([5.0, 1.0], [1, -1, 0, 0]), ([0.0, 9.0], [-1, 1, 1, -1])):
        state = memory(state, torch.tensor([view]), previous)
        torch.testing.assert_close(state[0, 3:], torch.tensor(last).float(), atol=1e-3, rtol=0)
    assert memory.offset(state).abs().max() == 0.0 and memory.offset(state).shape == (1, 8, 7)
    before = state
    for view in range(3):  # three views later nothing is left of the older ones but in h
        state = memory(state, torch.tensor([[float(view), 0.5]]), previous)
    assert not torch.equal(state[0, 3:], before[0, 3:])


def test_what_is_learnt_from_is_what_was_collected():
    """Log-probabilities and memories are computed again exactly: the first ratio is 1."""
    policy = blind()
    rollout = collected(policy)
    valid = rollout.data["valid"]
    again = recompute(policy, rollout.data)
    torch.testing.assert_close(again[valid], rollout.data[MEMORY][valid], atol=1e-5, rtol=1e-4)
    first = rollout.data[MEMORY][:, 0]
    assert not first.any() and not rollout.data[PREVIOUS_ACTION][:, 0].any()
    assert rollout.data[MEMORY][:, 1].abs().max() > 0.0
    batch = gather(policy, rollout, torch.ones_like(again[..., 0]), valid, None, Phase(), length=4)
    observation, texts = with_memory(policy, rollout, batch, rollout.data[MEMORY])
    found = policy.distribution(observation, texts)[0].log_prob(batch["sample"])
    torch.testing.assert_close(found, batch["log_probs"], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_copies_share_the_frozen_vla_that_the_memory_looks_through(trainable):
    policy = blind(trainable=trainable)
    twin = policy.copy()
    assert twin.frozen is policy.frozen and twin.memory is not policy.memory


def test_memory_adapters_and_value_learn():
    policy = blind()
    rollout = collected(policy)
    before = policy.state_dict()
    Learner(policy, PPOConfig(**BLIND)).update(rollout, *random_targets(rollout))
    changed = moved(policy, before)
    for part in ("memory.gru.weight_ih", "memory.out.weight", "lora_", "noise.log_std"):
        assert any(part in name for name in changed), part
    assert any(name.startswith("value_head.") for name in changed)
    assert FEATURES in rollout.data.keys() and "wrist" in rollout.data.keys()


def test_a_blind_run_plays_only_as_itself(tmp_path):
    from vla_gym_trainers.evaluation.policy_config import PolicyConfig
    from vla_gym_trainers.evaluation.trained import trained_on

    run(PPOConfig, tmp_path / "run", **{**BLIND, "total_steps": 40, "eval_every": 40})
    assert trained_on(tmp_path / "run").hidden_cameras and not trained_on(tmp_path).hidden_cameras
    asked = PolicyConfig(policy=str(tmp_path / "run"), chunk_len=8)
    with pytest.raises(ConfigError):  # its weights are the tiny VLA's, not mini's
        asked.make_policy()
