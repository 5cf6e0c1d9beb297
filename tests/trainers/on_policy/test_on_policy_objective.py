"""The losses of a micro-batch by hand: each with its coefficient, its count and its chunks."""

import math

import pytest
import torch
from on_policy_toys import tiny_policy, toy_shape

from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.objective import (
    LOSSES,
    SUMS,
    Counts,
    gather,
    loss_metrics,
    objective,
)
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.policy import Evaluation
from vla_gym_trainers.on_policy.rollout import Rollout

SETTINGS = PPOConfig(entropy_coef=0.1, kl_coef=0.5, value_coef=0.4, value_clip=0.2, bc_weight=0.6)
PHASE = Phase(cloning=0.2)


class KnownPolicy:
    """Says the same of every pair of chunks: new log-probabilities are -2 in both."""

    def __init__(self):
        self.device = torch.device("cpu")
        self.log_probs = torch.full((2, 8, 7), -2.0, requires_grad=True)

    def evaluate(self, *inputs):
        *_, tokens, teacher_tokens = inputs

        def of_chunks(*values):
            return torch.tensor(values)[:, None, None].expand(2, 8, 7)

        teacher = None if teacher_tokens is None else of_chunks(-1.0, -4.0)
        # Greedy are the teacher's tokens in the second chunk alone.
        greedy = torch.stack([tokens[0] + 1, tokens[1]])
        values = torch.tensor([0.9, 0.2])
        distance = torch.tensor([0.5, 7.0])
        entropy = of_chunks(3.0, 5.0)
        return Evaluation(self.log_probs, entropy, values, teacher, greedy, distance)


@pytest.fixture
def rollout():
    """One chunk of the student's, 1 control step, and one of the teacher's, 2 control steps."""
    rollout = Rollout.empty(toy_shape(2, 1, 1))
    rollout.instructions.append("push")  # index 0, as in all chunks
    data = rollout.data
    data["valid"].fill_(True)
    data["executed"][:, 0] = torch.tensor([1, 2])
    data["by_teacher"][1] = True
    data["log_probs"].fill_(-2.0 - math.log(1.1))
    data["values"][:, 0] = torch.tensor([0.5, 0.3])
    return rollout


def chunks_of(rollout, phase=PHASE):
    advantages, returns = torch.tensor([[2.0], [-9.0]]), torch.tensor([[1.0], [0.0]])
    keep = rollout.data["valid"]
    batch = gather(tiny_policy(), rollout, advantages, keep, returns, phase, held=True)
    batch["reference"] = torch.full((2, 8, 7), -2.0 + math.log(2.0))
    return batch


# Tokens: 7 of the student's chunk, 14 of the teacher's.
COUNTS = Counts(factors=7.0, ratios=7.0, chunks=1.0, held=7.0, valued=2.0, cloned=21.0)
PARTS = {
    "policy_loss": -2.2,  # r = 1.1, below 1.28, A = 2
    "entropy": 3.0,  # not the teacher's 5
    "squared_mean": 0.5,
    "reference_kl": 2.0 - math.log(2.0) - 1.0,  # exp(d) - d - 1 at d = log 2
    # (0.9 - 1)^2 clipped to (0.7 - 1)^2 = 0.09; (0.2 - 0)^2 = 0.04: half their mean
    "value_loss": 0.0325,
    "cloning_loss": 3.0,  # (7 x 1 + 14 x 4) / 21
    "clipped": 0.0,
    "kl": 7 * (0.1 - math.log(1.1)),  # r - 1 - log r
    "ratio_deviation": 0.7,  # 7 x |1.1 - 1|
    "right": 14.0,
}


def test_a_micro_batch_by_hand(rollout):
    policy = KnownPolicy()
    loss, parts = objective(policy, SETTINGS, rollout, chunks_of(rollout), COUNTS, PHASE)
    assert set(parts) == set(SUMS) == set(PARTS)
    found = {name: float(value) for name, value in parts.items()}
    assert found == pytest.approx(PARTS, abs=1e-6)
    # -2.2 - 0.1 x 3 + 0.6 x 0.5 + 0.5 x 0.30685 + 0.4 x 0.0325 + 0.2 x 3
    assert loss.item() == pytest.approx(-1.433574, abs=1e-5)
    loss.backward()
    # Surrogate: -r A / 7 = -2.2 / 7. KL: 0.5 (1 - exp(d)) / 7 = -0.5 / 7.
    expected = torch.zeros(2, 8, 7)
    expected[0, 0] = -2.7 / 7
    torch.testing.assert_close(policy.log_probs.grad, expected)


def test_counts_of_a_larger_minibatch_make_it_a_share(rollout):
    """The micro-batch is half of its minibatch: losses halve, plain sums stay."""
    twice = Counts(*(2.0 * count for count in COUNTS))
    loss, parts = objective(KnownPolicy(), SETTINGS, rollout, chunks_of(rollout), twice, PHASE)
    assert loss.item() == pytest.approx(-1.433574 / 2, abs=1e-5)
    assert float(parts["entropy"]) == pytest.approx(1.5)
    assert float(parts["ratio_deviation"]) == pytest.approx(0.7, abs=1e-5)


def test_what_does_not_take_part_is_not_there(rollout):
    nothing = Counts(*[0.0] * 6)
    args = KnownPolicy(), SETTINGS, rollout, chunks_of(rollout)
    loss, parts = objective(*args, nothing, Phase())
    assert loss.item() == 0.0 and not loss.requires_grad and not parts
    loss, parts = objective(*args, nothing._replace(valued=2.0), Phase())
    assert loss.item() == pytest.approx(0.4 * 0.0325) and set(parts) == {"value_loss"}


def test_metrics_are_means_over_an_update():
    # Two minibatches like the one above; losses come multiplied by their counts.
    counts = {name: 2.0 * value for name, value in COUNTS._asdict().items()}
    totals = counts | {name: 2.0 * value for name, value in PARTS.items()}
    for name in ("policy_loss", "entropy", "reference_kl"):
        totals[name] *= 7
    totals["value_loss"] *= 2
    totals["cloning_loss"] *= 21
    metrics = loss_metrics(totals)
    for name in LOSSES:
        assert metrics.pop(f"train/{name}") == pytest.approx(PARTS[name])
    assert metrics == pytest.approx(
        {
            "train/clip_fraction": 0.0,
            "train/kl": 0.1 - math.log(1.1),
            "train/ratio_deviation": 0.1,
            "train/cloning_accuracy": 14 / 21,
        }
    )
    assert loss_metrics(dict.fromkeys((*SUMS, *Counts._fields), 0.0)) == {}
