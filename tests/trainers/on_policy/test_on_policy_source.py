"""Rollouts that are collected while learning goes on: what acts and what is read stays as it is."""

import threading
import time

import pytest
import torch
from on_policy_toys import tiny_policy, toy_envs, toy_shape

from vla_gym.errors import ConfigError, WorkerError
from vla_gym_trainers.on_policy.collector import Collector
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.source import Order, RolloutSource


def order_of(seed, version=0, make_actor=lambda policy: policy):
    return Order(seed, version, make_actor)


@pytest.fixture
def make_source():
    made = []

    def make(policy, asynchronous=True, episodes=1, **kwargs):
        envs = toy_envs(2)
        shape = toy_shape(num_envs=2, episodes=episodes)
        source = RolloutSource(Collector(envs, shape), policy, asynchronous=asynchronous, **kwargs)
        made.extend([source, envs])
        return source

    yield make
    for part in made:
        part.close()


def spoil(policy):
    with torch.no_grad():
        for p in policy.named_parameters().values():
            p.add_(0.1)


class Gated:
    """A policy that waits for a signal before it acts."""

    def __init__(self, policy):
        self.policy, self.open, self.began = policy, threading.Event(), threading.Event()
        self.needs_values = policy.needs_values
        self.shrink, self.values = policy.shrink, policy.values

    def act(self, *inputs):
        self.began.set()
        assert self.open.wait(60)
        return self.policy.act(*inputs)


def test_learning_meanwhile_changes_nothing_that_acts(make_source):
    policy = tiny_policy(value=True)
    expected = make_source(policy, asynchronous=False).collect(order_of(7)).data.clone()
    source = make_source(policy)
    gates = []

    def gated(acting):
        gates.append(Gated(acting))
        return gates[-1]

    source.start(order_of(7, make_actor=gated))
    assert gates[0].began.wait(60) and source.is_pending
    spoil(policy)  # an update while the rollout is under way
    gates[0].open.set()
    data = source.take().data
    for key in expected.keys():
        assert torch.equal(data[key], expected[key]), key
    # The next one is played by the changed parameters.
    source.start(order_of(7))
    assert not torch.equal(source.take().data["log_probs"], expected["log_probs"])


def test_a_rollout_stays_while_the_next_one_is_written(make_source):
    source = make_source(tiny_policy())
    first = source.collect(order_of(1, version=3))
    before = first.data.clone()
    source.start(order_of(2, version=4))
    second = source.take()
    assert all(torch.equal(first.data[key], before[key]) for key in before.keys())
    assert first.data["tokens"].data_ptr() != second.data["tokens"].data_ptr()
    assert not torch.equal(first.data["proprio"], second.data["proprio"])
    assert first.data["version"].unique().tolist() == [3]
    assert second.data["version"].unique().tolist() == [4]
    with pytest.raises(ConfigError, match="start"):
        source.take()  # each one is handed out once


def test_it_is_started_once(make_source):
    source = make_source(tiny_policy())
    source.start(order_of(1))
    with pytest.raises(ConfigError, match="not been taken"):
        source.start(order_of(2))
    with pytest.raises(ConfigError, match="under way"):
        source.restart()
    source.take()
    synchronous = make_source(tiny_policy(), asynchronous=False)
    with pytest.raises(ConfigError, match="asynchronous source"):
        synchronous.start(order_of(1))
    assert not synchronous.is_asynchronous


def test_errors_of_the_thread_are_raised_where_it_is_taken(make_source):
    source = make_source(tiny_policy())

    def broken(policy):
        actor = Gated(policy)
        actor.act = lambda *_: 1 / 0
        return actor

    source.start(order_of(1, make_actor=broken))
    with pytest.raises(ZeroDivisionError):
        source.take()
    assert not source.is_pending


def test_waiting_has_a_deadline(make_source):
    source = make_source(tiny_policy(), deadline=0.2)
    gates = []

    def gated(policy):
        gates.append(Gated(policy))
        return gates[-1]

    source.start(order_of(1, make_actor=gated))
    began = time.perf_counter()
    with pytest.raises(WorkerError, match="longer than"):
        source.take()
    assert time.perf_counter() - began < 30
    gates[0].open.set()


def test_rows_of_fixed_length_begin_anew_after_a_restart(make_source):
    policy = tiny_policy()
    source = make_source(policy, asynchronous=False, episodes=None)
    source.collect(order_of(1))
    going_on = source.collect(order_of(9)).data.clone()
    source.restart()
    restarted = source.collect(order_of(9)).data.clone()
    fresh = make_source(policy, asynchronous=False, episodes=None).collect(order_of(9)).data
    assert not torch.equal(going_on["proprio"], restarted["proprio"])
    for key in ("proprio", "tokens", "rewards", "truncated"):
        assert torch.equal(fresh[key], restarted[key])
    assert isinstance(fresh, type(Rollout.empty(toy_shape()).data))
