"""The losses of a minibatch by hand: each with its coefficient, its count and its chunks."""

import math

import pytest
import torch
from on_policy_toys import tiny_policy, toy_rollout

from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.gradients import LOSSES, SUMS, means
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.minibatches import gather
from vla_gym_trainers.on_policy.phases import Phase

SETTINGS = PPOConfig(entropy_coef=0.1, kl_coef=0.5, value_coef=0.4, value_clip=0.2)
PHASE = Phase(cloning=0.2)


def of_chunks(*values):
    return torch.tensor(values)[:, None, None].expand(2, 8, 7).clone().requires_grad_()


class KnownPolicy:
    """A policy and its distribution: new log-probabilities of what was played are -2 in both."""

    device, value_head = torch.device("cpu"), None
    memory_size = 0

    def __init__(self):
        self.played, self.taught = of_chunks(-2.0, -2.0), of_chunks(-1.0, -4.0)
        self.entropies = of_chunks(3.0, 5.0)
        self.values = torch.tensor([0.9, 0.2], requires_grad=True)

    def copy(self):
        return self

    def named_parameters(self):
        return {"played": self.played, "value_head.values": self.values}

    def distribution(self, observation, instructions):
        assert len(observation["proprio"]) == len(instructions) == 2
        return self, None

    def log_prob(self, sample):  # the teacher's are all 1
        return self.taught if sample.any() else self.played

    def entropy(self):
        return self.entropies

    def mode(self):  # the teacher's in the second chunk alone
        return torch.stack([torch.zeros(8, 7), torch.ones(8, 7)])

    def values_of(self, value_input, count):
        assert value_input is None and count == 2
        return self.values


@pytest.fixture
def chunks():
    """One chunk of the student's, 1 control step, and one of the teacher's, 2 control steps."""
    rollout = toy_rollout(2, 1, 1)
    rollout.instructions.append("push")  # index 0, as in all chunks
    data = rollout.data
    data["valid"].fill_(True)
    data["teacher_sample"].fill_(1)
    data["executed"][:, 0] = torch.tensor([1, 2])
    data["by_teacher"][1] = True
    data["log_probs"].fill_(-2.0 - math.log(1.1))
    data["values"][:, 0] = torch.tensor([0.5, 0.3])
    targets = torch.tensor([[2.0], [-9.0]]), data["valid"], torch.tensor([[1.0], [0.0]])
    batch = gather(tiny_policy(), rollout, *targets, PHASE, held=True)
    batch["reference"] = torch.full((2, 8, 7), -2.0 + math.log(2.0))
    return rollout, batch


# Tokens: 7 of the student's chunk, 14 of the teacher's.
COUNTS = dict(zip(LOSSES, (7.0, 7.0, 7.0, 2.0, 21.0), strict=True))
PARTS = {
    "policy_loss": -2.2,  # r = 1.1, below 1.28, A = 2
    "entropy": 3.0,  # not the teacher's 5
    "reference_kl": math.log(2.0) ** 2 / 2.0,  # d^2 / 2 at d = -log 2
    # (0.9 - 1)^2 clipped to (0.7 - 1)^2 = 0.09; (0.2 - 0)^2 = 0.04: half their mean
    "value_loss": 0.0325,
    "cloning_loss": 3.0,  # (7 x 1 + 14 x 4) / 21
    "clipped": 0.0,
    "kl": 7 * (0.1 - math.log(1.1)),  # r - 1 - log r
    "deviation": 0.7,  # 7 x |1.1 - 1|
    "right": 14.0,
}


class Twice(ProcessGroup):
    """As if another process had the same chunks; gradients are this process's alone."""

    def sum(self, values):
        return 2.0 * super().sum(values)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_minibatch_by_hand(chunks, processes):
    policy = KnownPolicy()
    group = ProcessGroup() if processes == 1 else Twice()
    learner = Learner(policy, SETTINGS, group=group)
    sums, counts = learner.gradient(*chunks, PHASE)
    assert counts == {key: processes * count for key, count in COUNTS.items()}
    # Losses are shares of the minibatch; the rest are plain sums.
    plain = {key: PARTS[key] * (1 if key in LOSSES else processes) for key in SUMS}
    assert sums == pytest.approx(plain, abs=1e-5)
    # Surrogate: -r A / 7 = -2.2 / 7. KL: 0.5 d / 7, d = -log 2. Entropy: -0.1 / 7.
    first = torch.zeros(2, 8, 7)
    first[0, 0] = 1.0 / 7 / processes
    torch.testing.assert_close(policy.played.grad, -(2.2 + 0.5 * math.log(2.0)) * first)
    torch.testing.assert_close(policy.entropies.grad, -0.1 * first)
    executed = torch.zeros(2, 8, 7)
    executed[0, :1], executed[1, :2] = 1.0, 1.0
    torch.testing.assert_close(policy.taught.grad, -0.2 / 21 / processes * executed)
    # The first value is clipped; the second: 0.4 x 2 x 0.2 / (2 x 2).
    torch.testing.assert_close(policy.values.grad, torch.tensor([0.0, 0.04]) / processes)


def test_metrics_are_means_over_an_update():
    # Two minibatches like the one above; losses come multiplied by their counts.
    totals = {name: 2.0 * value * COUNTS.get(name, 1.0) for name, value in PARTS.items()}
    metrics = means(totals, {name: 2.0 * count for name, count in COUNTS.items()})
    expected = {f"train/{name}": pytest.approx(PARTS[name]) for name in LOSSES}
    assert metrics == expected | {
        "train/clip_fraction": 0.0,
        "train/kl": pytest.approx(0.1 - math.log(1.1)),
        "train/ratio_deviation": pytest.approx(0.1),
        "train/cloning_accuracy": pytest.approx(14 / 21),
    }
    assert means(dict.fromkeys(SUMS, 0.0), dict.fromkeys(LOSSES, 0.0)) == {}
