"""Formulas: known answers with their arithmetic, a plain loop."""

import math

import numpy as np
import pytest
import torch

from vla_gym_trainers.on_policy.formulas import (
    gae,
    group_relative,
    moments,
    ppo_loss,
    ratio_of,
    reference_kl,
    standardize,
)


def row(*values, dtype=torch.float32):
    return torch.tensor([values], dtype=dtype)


def flags(text):
    return torch.tensor([[c == "1" for c in text]])


def test_gae_bootstraps_through_truncation_but_does_not_leak_into_the_next_episode():
    # Slot 1 is truncated with V(s') = 0.6, slot 2 begins another episode. gamma^k 0.9, lambda 1.
    # delta_2 = 1 - 0.5 = 0.5 (terminated)          A_2 = 0.5
    # delta_1 = 0.9 * 0.6 - 0.3 = 0.24              A_1 = 0.24, nothing of A_2
    # delta_0 = 0.9 * 0.3 - 0.2 = 0.07              A_0 = 0.07 + 0.9 * 0.24 = 0.286
    arguments = [row(0.0, 0.0, 1.0), row(0.2, 0.3, 0.5), row(0.3, 0.6, 7.0), row(0.9, 0.9, 0.9)]
    ended, truncated, valid = flags("001"), flags("010"), flags("111")
    advantages, _ = gae(*arguments, ended, truncated, valid, gae_lambda=1.0)
    torch.testing.assert_close(advantages, row(0.286, 0.24, 0.5))
    # The same truncation taken for a termination would give delta_1 = -0.3.
    merged, _ = gae(*arguments, ended | truncated, flags("000"), valid, gae_lambda=1.0)
    torch.testing.assert_close(merged[:, 1], torch.tensor([-0.3]))
    # A transition lost with its worker: the one before it bootstraps, A_1 = 0.24 as before.
    lost, returns = gae(*arguments, ended, flags("000"), flags("110"), gae_lambda=1.0)
    torch.testing.assert_close(lost, row(0.286, 0.24, 0.0))
    assert returns[0, 2] == 0.0
    # The end of the data is no end of the episode: A_2 = 1 + 0.9 * 7 - 0.5 = 6.8.
    cut, _ = gae(*arguments, flags("000"), truncated, valid, gae_lambda=1.0)
    torch.testing.assert_close(cut[:, 2], torch.tensor([6.8]))


def loop_gae(rewards, values, next_values, discounts, terminated, truncated, valid, lam):
    """As one would write it down for one chunk after the other: a sum of deltas."""
    num_rows, num_slots = rewards.shape
    result = np.zeros((num_rows, num_slots))
    for n in range(num_rows):
        for t in range(num_slots):
            weight = 1.0
            for u in range(t, num_slots):
                if not valid[n, u]:
                    break
                follows = 0.0 if terminated[n, u] else next_values[n, u]
                delta = rewards[n, u] + discounts[n, u] * follows - values[n, u]
                result[n, t] += weight * delta
                weight *= lam * discounts[n, u]
                if terminated[n, u] or truncated[n, u]:
                    break
    return result


@pytest.mark.parametrize("seed", range(5))
def test_gae_equals_the_loop_for_random_shapes(seed):
    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 7)), int(rng.integers(1, 30))
    rewards, values, next_values = rng.normal(size=(3, *shape))
    discounts = 0.97 ** rng.integers(0, 9, shape)
    ends = rng.random(shape)
    terminated, truncated, valid = ends < 0.1, (ends > 0.1) & (ends < 0.2), rng.random(shape) < 0.9
    lam = float(rng.random())
    arrays = (rewards, values, next_values, discounts, terminated, truncated, valid)
    tensors = [torch.from_numpy(x) for x in arrays]
    advantages, returns = gae(*tensors, gae_lambda=lam)
    expected = loop_gae(*arrays, lam)
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(returns.numpy(), np.where(valid, expected + values, 0), atol=1e-12)


def test_group_relative():
    # Group 7: returns 1, 0, 0, 0: mean 1/4, variance (9/16 + 3/16) / 3 = 1/4, std 1/2:
    # A = (3/4) / (1/2) = 1.5 and (-1/4) / (1/2) = -0.5. Group 3: all succeed, dropped. Group 5:
    # one member was lost, the other alone has no contrast, dropped.
    returns = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, math.nan, 1.0])
    groups = torch.tensor([7, 3, 7, 7, 3, 7, 5, 5])
    valid = torch.tensor([True, True, True, True, True, True, False, True])
    advantages, keep = group_relative(returns, groups, valid)
    expected = torch.tensor([1.5, 0.0, -0.5, -0.5, 0.0, -0.5, 0.0, 0.0])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)
    assert keep.tolist() == [True, False, True, True, False, True, False, False]


def test_group_relative_to_the_mean_by_length():
    # Group 0: returns 1, 0, 0 of 10, 20 and 20 tokens: 10/50 = 0.2, and sum l A = 8 - 4 - 4 = 0.
    # Group 1: 1 and 0.5 of 30 and 10 tokens: 35/40 = 0.875; a lost member does not count.
    returns = torch.tensor([1.0, 1.0, 0.0, 0.5, 0.0, math.nan])
    groups = torch.tensor([0, 1, 0, 1, 0, 1])
    valid = torch.tensor([True, True, True, True, True, False])
    lengths = torch.tensor([10, 30, 20, 10, 20, 40])
    scaled, keep = group_relative(returns, groups, valid, lengths=lengths)
    assert keep.tolist() == [True, True, True, True, True, False]
    # The scale is still the group's deviation: of 1, 0, 0 sqrt((4/9 + 1/9 + 1/9) / 2) = 0.57735.
    expected = torch.tensor([0.8, -0.2, -0.2]) / 0.57735
    torch.testing.assert_close(scaled[[0, 2, 4]], expected, rtol=1e-4, atol=0)
    assert (scaled[1] / scaled[3]).item() == pytest.approx(0.125 / -0.375, rel=1e-4)


def test_equal_returns_that_round_have_no_contrast():
    # Three times 0.1 in float32: its mean is not exactly 0.1, so a variance would be positive.
    advantages, keep = group_relative(
        torch.full((3,), 0.1), torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)
    )
    assert not keep.any() and not advantages.any()


def test_standardize_by_the_moments_of_all_parts():
    # 1, 2, 3, 6 have mean 3 and sample variance (4 + 1 + 0 + 9) / 3 = 14 / 3.
    parts = torch.tensor([[1.0, 2.0, 99.0], [3.0, 6.0, 99.0]])
    mask = torch.tensor([[True, True, False]] * 2)
    sums = sum(moments(part, m) for part, m in zip(parts, mask, strict=True))
    torch.testing.assert_close(
        standardize(parts, mask, sums)[:, :2],
        (parts[:, :2] - 3.0) / math.sqrt(14 / 3),
        check_dtype=False,
    )
    assert (standardize(parts, mask, sums)[:, 2] == 0).all()
    one = torch.tensor([5.0]), torch.tensor([True])
    assert standardize(*one, moments(*one)).tolist() == [0.0]


def tokens(*values):
    """Log-ratios of one chunk of one step: (1, 1, n)."""
    return torch.tensor([[list(values)]])


def test_ppo_clips_the_ratio_asymmetrically():
    # Ratios 1.5, 0.5, 1.0 of one chunk; the fourth token was never executed.
    new = torch.log(tokens(1.5, 0.5, 1.0, 3.0)).requires_grad_()
    mask = torch.tensor([[[True, True, True, False]]])
    ratio = ratio_of(new, torch.zeros_like(new), mask)
    # A = 2: min(3, 2 * 1.28) = 2.56 (clipped), min(1, 2 * 0.8) = 1, 2: L = -(5.56) / 3.
    up = ppo_loss(*ratio, torch.tensor([2.0]), count=3)
    assert up.loss.item() == pytest.approx(-5.56 / 3, abs=1e-6)
    assert up.clipped == 1
    # KL: r - 1 - log r = 0.5 - log 1.5, -0.5 + log 2, 0.
    assert up.kl.item() == pytest.approx(0.5 - math.log(1.5) - 0.5 + math.log(2), abs=1e-6)
    # Gradient of -r A / 3 with respect to log r: -r A / 3, none where it was clipped or masked.
    (grad,) = torch.autograd.grad(up.loss, new, retain_graph=True)
    torch.testing.assert_close(grad, tokens(0.0, -1.0 / 3, -2.0 / 3, 0.0))
    # A = -2: min(-3, -2.56) = -3, min(-1, -1.6) = -1.6 (clipped), -2: L = 6.6 / 3.
    down = ppo_loss(*ratio, torch.tensor([-2.0]), count=3)
    assert down.loss.item() == pytest.approx(6.6 / 3, abs=1e-6)
    assert down.clipped == 1


def test_ratio_of_a_chunk_is_the_product_of_its_executed_tokens():
    # log r = 0.1 + 0.2, the masked 5 apart: r = e^0.3 = 1.35 > 1.28: L = -1.28 / 1.
    new, old = tokens(0.1, 0.2, 5.0), torch.zeros(1, 1, 3)
    mask = torch.tensor([[[True, True, False]]])
    ratio = ratio_of(new, old, mask, "chunk")
    torch.testing.assert_close(ratio[0], torch.tensor([0.3]))
    assert ratio[1].tolist() == [True]
    loss = ppo_loss(*ratio, torch.ones(1), count=1)
    assert loss.loss.item() == pytest.approx(-1.28)
    assert not ratio_of(new, old, mask & False, "chunk")[1].any()
    mean, counted = ratio_of(new, old, mask, "chunk-mean")
    torch.testing.assert_close(mean, torch.tensor([0.15]))
    assert counted.tolist() == [True]
    nothing, counted = ratio_of(new, old, mask & False, "chunk-mean")
    assert nothing.tolist() == [0.0] and counted.tolist() == [False]


def test_log_ratio_is_clamped_so_that_nothing_overflows():
    new = tokens(500.0, -500.0, 0.0).requires_grad_()
    mask = torch.ones(1, 1, 3, dtype=torch.bool)
    ratio = ratio_of(new, torch.zeros_like(new), mask, clamp=10.0)
    torch.testing.assert_close(ratio[0], tokens(10.0, -10.0, 0.0))
    loss = ppo_loss(*ratio, torch.tensor([-1.0]), count=3)
    # -min(-e^10, -1.28) + -min(-e^-10, -0.8) + 1 = e^10 + 0.8 + 1, over 3.
    assert loss.loss.item() == pytest.approx((math.exp(10) + 1.8) / 3, rel=1e-6)
    (grad,) = torch.autograd.grad(loss.loss, new)
    torch.testing.assert_close(grad, tokens(0.0, 0.0, 1.0 / 3))


def test_the_reference_pulls_as_the_kl_does():
    """Over the policy's own samples, each as often as it draws them."""
    logits = torch.tensor([0.3, -1.0, 2.0, -12.0], requires_grad=True)
    reference = torch.tensor([1.0, 0.5, -0.5, 0.0]).log_softmax(dim=0)
    log_p = logits.log_softmax(dim=0)
    p = log_p.exp()
    (expected,) = torch.autograd.grad(p @ (log_p - reference), logits, retain_graph=True)
    mask = torch.tensor(True)
    each = [reference_kl(log_p[a], reference[a], mask, 1) for a in range(4)]
    (found,) = torch.autograd.grad(p.detach() @ torch.stack(each), logits)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_masked_tokens_may_hold_anything():
    new = tokens(0.0, math.nan).requires_grad_()
    mask = torch.tensor([[[True, False]]])
    ratio = ratio_of(new, tokens(0.0, -math.inf), mask)
    loss = ppo_loss(*ratio, torch.tensor([3.0]), count=1).loss
    assert loss.item() == -3.0
    kl = reference_kl(new, tokens(0.0, math.inf), mask, 1)
    assert kl.item() == 0.0 and not torch.autograd.grad(kl, new)[0].any()
    assert torch.autograd.grad(loss, new)[0][0, 0, 0] == -3.0
