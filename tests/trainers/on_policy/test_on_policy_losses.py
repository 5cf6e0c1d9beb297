"""Losses on tokens: known answers with their arithmetic; parts that add up to the whole."""

import math

import pytest
import torch
from torch.nn import functional as F

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.losses import (
    cloning_loss,
    masked_mean,
    ppo_loss,
    ratio_of,
    reference_kl,
    value_loss,
)


def tokens(*values):
    """Log-ratios of one chunk of one step: (1, 1, n)."""
    return torch.tensor([[list(values)]])


def test_ppo_clips_the_ratio_asymmetrically():
    # Ratios 1.5, 0.5, 1.0 of one chunk; the fourth token was never executed.
    new = torch.log(tokens(1.5, 0.5, 1.0, 3.0)).requires_grad_()
    mask = torch.tensor([[[True, True, True, False]]])
    ratio = ratio_of(new, torch.zeros_like(new), mask)
    # A = 2: min(3, 2 * 1.28) = 2.56 (clipped), min(1, 2 * 0.8) = 1, 2: L = -(5.56) / 3.
    up = ppo_loss(ratio, torch.tensor([2.0]), count=3)
    assert up.loss.item() == pytest.approx(-5.56 / 3, abs=1e-6)
    assert up.clipped == 1
    # KL: r - 1 - log r = 0.5 - log 1.5, -0.5 + log 2, 0.
    assert up.kl.item() == pytest.approx(0.5 - math.log(1.5) - 0.5 + math.log(2), abs=1e-6)
    # Gradient of -r A / 3 with respect to log r: -r A / 3, none where it was clipped or masked.
    (grad,) = torch.autograd.grad(up.loss, new, retain_graph=True)
    torch.testing.assert_close(grad, tokens(0.0, -1.0 / 3, -2.0 / 3, 0.0))
    # A = -2: min(-3, -2.56) = -3, min(-1, -1.6) = -1.6 (clipped), -2: L = 6.6 / 3.
    down = ppo_loss(ratio, torch.tensor([-2.0]), count=3)
    assert down.loss.item() == pytest.approx(6.6 / 3, abs=1e-6)
    assert down.clipped == 1


def test_ratio_of_a_chunk_is_the_product_of_its_executed_tokens():
    # log r = 0.1 + 0.2, the masked 5 apart: r = e^0.3 = 1.35 > 1.28: L = -1.28 / 1.
    new, old = tokens(0.1, 0.2, 5.0), torch.zeros(1, 1, 3)
    mask = torch.tensor([[[True, True, False]]])
    ratio = ratio_of(new, old, mask, "chunk")
    torch.testing.assert_close(ratio.log_ratio, torch.tensor([0.3]))
    assert ratio.mask.tolist() == [True]
    loss = ppo_loss(ratio, torch.ones(1), count=1)
    assert loss.loss.item() == pytest.approx(-1.28)
    assert not ratio_of(new, old, mask & False, "chunk").mask.any()
    with pytest.raises(ConfigError, match="'factor' or 'chunk'"):
        ratio_of(new, old, mask, "episode")


def test_log_ratio_is_clamped_so_that_nothing_overflows():
    new = tokens(500.0, -500.0, 0.0).requires_grad_()
    mask = torch.ones(1, 1, 3, dtype=torch.bool)
    ratio = ratio_of(new, torch.zeros_like(new), mask, clamp=10.0)
    torch.testing.assert_close(ratio.log_ratio, tokens(10.0, -10.0, 0.0))
    loss = ppo_loss(ratio, torch.tensor([-1.0]), count=3)
    # -min(-e^10, -1.28) + -min(-e^-10, -0.8) + 1 = e^10 + 0.8 + 1, over 3.
    assert loss.loss.item() == pytest.approx((math.exp(10) + 1.8) / 3, rel=1e-6)
    (grad,) = torch.autograd.grad(loss.loss, new)
    torch.testing.assert_close(grad, tokens(0.0, 0.0, 1.0 / 3))


def test_masked_tokens_may_hold_anything():
    new = tokens(0.0, math.nan).requires_grad_()
    mask = torch.tensor([[[True, False]]])
    ratio = ratio_of(new, tokens(0.0, -math.inf), mask)
    loss = ppo_loss(ratio, torch.tensor([3.0]), count=1).loss
    assert loss.item() == -3.0
    assert reference_kl(new, tokens(0.0, math.inf), mask, 1).item() == 0.0
    assert torch.autograd.grad(loss, new)[0][0, 0, 0] == -3.0


def test_first_update_has_ratio_one_and_the_gradient_of_reinforce():
    torch.manual_seed(0)
    logits = torch.randn(5, 2, 7, 256, requires_grad=True)
    drawn = torch.randint(256, (5, 2, 7))
    log_probs = logits.log_softmax(-1).gather(-1, drawn[..., None])[..., 0]
    mask, advantages = torch.rand(5, 2, 7) < 0.7, torch.randn(5)
    count = int(mask.sum())
    loss = ppo_loss(ratio_of(log_probs, log_probs.detach(), mask), advantages, count)
    assert loss.kl == 0.0 and loss.clipped == 0
    reinforce = -masked_mean(log_probs * advantages[:, None, None], mask, count)
    (mine,) = torch.autograd.grad(loss.loss, logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(reinforce, logits)
    torch.testing.assert_close(mine, theirs)


def test_reference_kl():
    # d = log 0.5 - log 0.25 = log 2: 2 - log 2 - 1; d = 0: 0; over 2 tokens.
    log_probs, reference = tokens(math.log(0.25), -1.0), tokens(math.log(0.5), -1.0)
    mask = torch.ones(1, 1, 2, dtype=torch.bool)
    assert reference_kl(log_probs, reference, mask, 2).item() == pytest.approx(
        (1 - math.log(2)) / 2, abs=1e-6
    )


def test_reference_kl_estimates_the_kl_of_two_distributions():
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.5, 0.25, 0.25])
    exact = (p * (p / q).log()).sum().item()
    drawn = torch.multinomial(p, 200_000, True, generator=torch.Generator().manual_seed(0))
    shape = (1, 1, -1)
    estimate = reference_kl(
        p.log()[drawn].view(shape),
        q.log()[drawn].view(shape),
        torch.ones(1, 1, len(drawn), dtype=torch.bool),
        len(drawn),
    )
    assert estimate.item() == pytest.approx(exact, abs=0.002)


def test_value_loss_takes_the_larger_error():
    # V 1.0 from V_old 0.0: error to G = 2: 1; moved only 0.2: (0.2 - 2)^2 = 3.24, larger.
    # V 0.1 from 0.0, G = 0: 0.01; 0.1 lies within the clip: the same. Sum 3.25 / (2 * 2).
    values, old, returns = torch.tensor([1.0, 0.1]), torch.zeros(2), torch.tensor([2.0, 0.0])
    assert value_loss(values, old, returns, 2).item() == pytest.approx(3.25 / 4)
    assert value_loss(values, old, returns, 2, clip=None).item() == pytest.approx(1.01 / 4)


def test_cloning_loss_is_torchs_cross_entropy():
    torch.manual_seed(1)
    logits, teacher = torch.randn(3, 2, 7, 256), torch.randint(256, (3, 2, 7))
    mask = torch.rand(3, 2, 7) < 0.5
    log_probs = logits.log_softmax(-1).gather(-1, teacher[..., None])[..., 0]
    expected = F.cross_entropy(logits[mask], teacher[mask])
    torch.testing.assert_close(cloning_loss(log_probs, mask, int(mask.sum())), expected)


@pytest.mark.parametrize("level", ["factor", "chunk"])
def test_parts_add_up_to_the_whole(level):
    torch.manual_seed(2)
    new, old = torch.randn(6, 2, 7), torch.randn(6, 2, 7)
    mask = torch.rand(6, 2, 7) < 0.6
    mask[4] = False
    advantages = torch.randn(6)
    whole = ratio_of(new, old, mask, level)
    count = int(whole.mask.sum())
    parts = [
        ppo_loss(ratio_of(new[s], old[s], mask[s], level), advantages[s], count)
        for s in (slice(0, 1), slice(1, 5), slice(5, 6))
    ]
    expected = ppo_loss(whole, advantages, count)
    for name in ("loss", "clipped", "kl"):
        total = sum(getattr(part, name) for part in parts)
        torch.testing.assert_close(total, getattr(expected, name))
