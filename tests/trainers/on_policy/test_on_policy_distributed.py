"""Two processes over gloo learn what one process learns on the same global batch."""

import multiprocessing
import os
import socket
from contextlib import nullcontext

import pytest
import torch
from on_policy_toys import collected, part_of, shuffled, tiny_policy

from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.distributed import (
    ProcessGroup,
    local_device,
    local_rendering,
    process_group,
)
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.phases import Phase

SETTINGS = PPOConfig(
    learning_rate=3e-3,
    epochs=2,
    num_minibatches=3,
    micro_batch_size=16,
    entropy_coef=0.01,
    value_epochs=2,
    seed=5,
)


@pytest.fixture(scope="module")
def rollout():
    return shuffled(collected(tiny_policy(value=True), episodes=1))


def learn(rollout, rows, kept_rows, weights, among):
    """Learn from some rows; parameters begin differently in each process but the first."""
    part = part_of(rollout, rows)
    generator = torch.Generator().manual_seed(0)
    advantages = torch.randn(rollout.data.shape, generator=generator)[rows]
    returns = torch.rand(rollout.data.shape, generator=generator)[rows]
    keep = part.data["valid"] & torch.isin(torch.arange(4), torch.tensor(kept_rows))[rows, None]
    learner = Learner(tiny_policy(value=True, seed=among.rank), SETTINGS, group=among)
    if among.rank:  # the frozen weights are not sent
        frozen = tiny_policy(value=True, seed=0).vla.model.state_dict()
        names = {n for n, p in learner.policy.vla.model.named_parameters() if p.requires_grad}
        own = {k: v for k, v in frozen.items() if k not in names}
        learner.policy.vla.model.load_state_dict(own, strict=False)
    metrics = learner.update(part, advantages, keep, returns, weights)
    return learner.policy.state_dict(), metrics


def in_child(rank, port, folder, job, joins):
    os.environ |= {
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with nullcontext() if joins else process_group() as among:
        result = job() if joins else job(among)
    torch.save(result, folder / f"{rank}.pt")


def two_processes(folder, job, joins=False):
    """What a job returns in each of two processes that learn together; a job may join by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    jobs = [(rank, port, folder, job, joins) for rank in (0, 1)]
    children = [context.Process(target=in_child, args=arguments) for arguments in jobs]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=240)
    alive = [child for child in children if child.is_alive()]
    for child in alive:
        child.kill()
    assert not alive and [child.exitcode for child in children] == [0, 0]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def assert_as_one(processes, alone, updates):
    """Compare (parameters, metrics) of two processes with those of one that did it all."""
    ((first, metrics), (second, others)), (expected, of_one) = processes, alone
    assert metrics == others and metrics["train/updates"] == updates
    for key, value in of_one.items():
        assert metrics[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    for name, value in expected.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value, atol=3e-5, rtol=1e-3)


@pytest.mark.parametrize("kept_rows", [(0, 1, 2, 3), (0, 1)])
def test_two_processes_equal_one(rollout, tmp_path, kept_rows):
    # With rows 0 and 1 alone, the second process has nothing to learn from.
    weights = Phase(cloning=0.5) if len(kept_rows) == 4 else Phase(value=False)
    halves = [slice(0, 1), slice(1, 4)] if len(kept_rows) == 4 else [slice(0, 2), slice(2, 4)]

    def job(among):
        return learn(rollout, halves[among.rank], kept_rows, weights, among)

    found = two_processes(tmp_path, job)
    alone, metrics = learn(rollout, slice(0, 4), kept_rows, weights, ProcessGroup())
    assert_as_one(found, (alone, metrics), updates=6)
    start = tiny_policy(value=True).state_dict()
    assert max(float((alone[n] - start[n]).abs().max()) for n in start) > 1e-3


def test_each_process_of_a_machine_has_its_own_gpu(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_device("cuda:3") == "cuda:3" and local_rendering("cuda") == {}
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert [local_device(name) for name in ("cuda", "cuda:0", "cpu")] == ["cuda:1", "cuda:1", "cpu"]
    assert local_rendering("cuda") == {"render_devices": [1]} and local_rendering("cpu") == {}
