"""Passes of the value head alone: what is stored for them, what they fit, what they leave alone."""

from collections import deque

import numpy as np
import pytest
import torch
from on_policy_toys import collected, moved, tiny_policy, tiny_vla

from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.phases import MixedActor, VLATeacher
from vla_gym_trainers.on_policy.value_fit import STEPS, fit_values


def fitted(policy, *pairs, epochs, rate=3e-3):
    """Fit the head to rollouts with returns [rows, chunks]."""
    played = deque()
    for rollout, returns in pairs:
        valid = rollout.data["valid"]
        played.append((rollout.data["value_input"][valid], returns[valid]))
    optimizer = torch.optim.Adam(policy.value_head.parameters(), lr=rate)
    settings = {"epochs": epochs, "max_grad_norm": 10.0}
    rng = np.random.default_rng(0)
    return fit_values(
        policy.value_head, optimizer, played, group=ProcessGroup(), rng=rng, **settings
    )


@pytest.fixture(scope="module")
def rollout():
    return collected(tiny_policy(value=True), seed=3)


@pytest.mark.parametrize("epsilon", [None, 0.5])
def test_inputs_are_what_values_were_read_off(epsilon):
    policy, actor = tiny_policy(value=True), None
    torch.nn.init.normal_(policy.value_head.fc2.weight)
    if epsilon is not None:
        actor = MixedActor(policy, VLATeacher(tiny_vla()), epsilon)
    data = collected(policy, actor, seed=3).data
    valid = data["valid"]
    assert valid.sum() > 10
    with torch.no_grad():
        values = policy.value_head(data["value_input"][valid])
    torch.testing.assert_close(values, data["values"][valid], atol=1e-5, rtol=1e-5)
    assert values.std() > 1e-3  # of several states, not of one


def test_the_error_before_any_step_is_half_the_mean_square(rollout):
    policy = tiny_policy(value=True)  # a fresh head says 0
    high, low = (torch.full(rollout.data.shape, value) for value in (0.6, 0.2))
    # 0.6 ** 2 / 2 = 0.18 and 0.2 ** 2 / 2 = 0.02 for every chunk; a step size of 0 leaves it so.
    for pairs, expected in (
        ([(rollout, high)], 0.18),
        ([(rollout, high), (rollout, low)], 0.1),
    ):
        assert fitted(policy, *pairs, epochs=2, rate=0.0) == pytest.approx(expected)
        assert fitted(policy, *pairs, epochs=0) == 0.0


def test_returns_are_fitted_where_there_are_chunks(rollout):
    policy = tiny_policy(value=True)
    # What the state shows; in slots without a chunk something that would spoil the fit.
    returns = torch.where(rollout.data["valid"], rollout.data["proprio"][..., 0], 1e6)
    first, last = (fitted(policy, (rollout, returns), epochs=n) for n in (1, 40))
    assert last < 0.1 * first


def test_a_number_that_is_none_spoils_nothing(rollout):
    policy = tiny_policy(value=True)
    returns = torch.full(rollout.data.shape, 0.6)
    returns[0, 0] = torch.nan
    assert rollout.data["valid"][0, 0]
    loss = fitted(policy, (rollout, returns), epochs=20)
    assert loss < 0.09  # half of what it was
    assert all(p.isfinite().all() for p in policy.value_head.parameters())


def test_the_learner_moves_the_head_alone_and_only_if_asked_to(rollout):
    targets = [torch.zeros(rollout.data.shape), rollout.data["valid"] & False]
    returns = torch.ones(rollout.data.shape)
    seen = {}
    for epochs in (0, 3):
        policy = tiny_policy(value=True)
        before = policy.state_dict()
        settings = PPOConfig(value_epochs=epochs, num_minibatches=1)
        learner = Learner(policy, settings)
        seen[epochs] = learner.update(rollout, *targets, returns)
        names = moved(policy, before)
        assert names and all(name.startswith("value_head.") for name in names)
        head = learner.optimizer.param_groups[1]["params"]
        steps = {float(learner.optimizer.state[p]["step"]) for p in head}
        assert steps == {1.0 + epochs * STEPS}  # one minibatch of the update itself
    assert "train/value_fit_loss" not in seen[0]
    assert 0.0 < seen[3]["train/value_fit_loss"] < 0.5


def test_a_restored_learner_remembers_the_same_rollouts(rollout, tmp_path):
    zeros = torch.zeros(rollout.data.shape)
    settings = PPOConfig(value_epochs=2, value_replay=2)

    def update(learner, value):
        learner.update(rollout, zeros, rollout.data["valid"] & False, zeros + value)

    learner = Learner(tiny_policy(value=True), settings)
    for value in (0.1, 0.5, 0.9):  # the first one is forgotten
        update(learner, value)
    other = Learner(tiny_policy(value=True), settings)
    learner.save(tmp_path)
    other.restore(tmp_path)
    assert [float(returns[0]) for _, returns in other.played] == pytest.approx([0.5, 0.9])
    for one in (learner, other):
        update(one, 0.3)
    mine, theirs = learner.policy.state_dict(), other.policy.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
