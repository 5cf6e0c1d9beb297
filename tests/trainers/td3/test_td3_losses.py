"""Hand-computed TD3+BC targets and losses."""

from __future__ import annotations

import math

import pytest
import torch

from vla_gym_trainers import networks
from vla_gym_trainers.networks import CriticEnsemble
from vla_gym_trainers.td3 import losses
from vla_gym_trainers.td3.updates import polyak


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_target_uses_min_critic_discount_and_termination() -> None:
    # Row 0: full chunk of 8 at gamma 0.99, nothing happened:  0 + 0.99^8 * min(0.5, 0.4)
    # Row 1: chunk cut to 3 steps by the time limit (not terminal): 0 + 0.99^3 * min(0.2, 0.3)
    # Row 2: success in the 5th step: reward 0.99^4, no bootstrap whatever Q says
    target = losses.td3_target(
        rewards=tensor(0.0, 0.0, 0.99**4),
        terminations=tensor(0.0, 0.0, 1.0),
        discounts=tensor(0.99**8, 0.99**3, 0.99**5),
        next_q=torch.tensor([[0.5, 0.4], [0.2, 0.3], [0.9, 0.9]]),
    )
    expected = tensor(0.92274469 * 0.4, 0.970299 * 0.2, 0.96059601)
    torch.testing.assert_close(target, expected)


def test_target_clamps_to_the_reachable_return() -> None:
    arguments = (tensor(0.0, 0.0), tensor(0.0, 0.0), tensor(0.9, 0.9))
    next_q = torch.tensor([[3.0, 2.0], [-1.0, 0.5]])
    torch.testing.assert_close(losses.td3_target(*arguments, next_q), tensor(1.0, 0.0))
    free = losses.td3_target(*arguments, next_q, value_range=None)
    torch.testing.assert_close(free, tensor(1.8, -0.9))


def test_target_mixes_monte_carlo_where_it_is_known() -> None:
    # 0.5 * (0.9 * 0.4) + 0.5 * 0.1 = 0.23; the second row's episode is still running.
    target = losses.td3_target(
        tensor(0.0, 0.0),
        tensor(0.0, 0.0),
        tensor(0.9, 0.9),
        torch.tensor([[0.4, 0.6], [0.4, 0.6]]),
        mc_returns=tensor(0.1, math.nan),
        mc_weight=0.5,
    )
    torch.testing.assert_close(target, tensor(0.23, 0.36))


def test_target_carries_no_gradient() -> None:
    next_q = torch.ones(1, 2, requires_grad=True)
    assert not losses.td3_target(tensor(0), tensor(0), tensor(0.9), next_q).requires_grad


def test_critic_loss_sums_over_critics_and_averages_over_the_batch() -> None:
    # critic 0: ((0.5 - 0)^2 + (1 - 1)^2) / 2 = 0.125; critic 1: ((1 - 0)^2 + (0 - 1)^2) / 2 = 1
    q = torch.tensor([[0.5, 1.0], [1.0, 0.0]])
    assert losses.critic_loss(q, tensor(0.0, 1.0)).item() == pytest.approx(1.125)


def test_reference_distance_is_a_sum_in_scaled_units() -> None:
    # (0.1 / 1)^2 + (0.03 / 0.3)^2 = 0.02
    distance = losses.reference_distance(
        torch.tensor([[0.6, 0.03]]), torch.tensor([[0.5, 0.0]]), tensor(1.0, 0.3)
    )
    assert distance.item() == pytest.approx(0.02)


def test_actor_loss_known_answer_and_gradient() -> None:
    # q = (0.2, 0.6): -mean / mean|q| = -1; distances (0.04, 0): mean 0.02; loss -1 + 0.5 * 0.02
    actions = torch.tensor([[0.2], [0.0]], requires_grad=True)
    q = actions[:, 0] + tensor(0.0, 0.6)
    both = q, actions, torch.zeros(2, 1), torch.ones(1)
    divisor = losses.q_divisor(q)
    loss, distance = losses.actor_loss(*both, bc_weight=0.5, divisor=divisor)
    assert loss.item() == pytest.approx(-0.99)
    assert distance.item() == pytest.approx(0.02)
    loss.backward()
    # d/da: -(1/2) / 0.4 from Q, and 0.5 * (1/2) * 2a from the distance
    torch.testing.assert_close(actions.grad, torch.tensor([[-1.25 + 0.1], [-1.25]]))
    # a beta for each row: -1 + (0.5 * 0.04 + 3 * 0) / 2
    loss, distance = losses.actor_loss(*both, tensor(0.5, 3.0), divisor)
    assert loss.item() == pytest.approx(-0.99)
    loss, distance = losses.actor_loss(*both, tensor(3.0, 0.5), divisor)
    assert (loss.item(), distance.item()) == pytest.approx((-0.94, 0.02))


def test_actor_loss_floor_keeps_a_dead_critic_small() -> None:
    actions = torch.zeros(1, 1, requires_grad=True)
    q = actions[:, 0] * 1e-4
    divisor = losses.q_divisor(q)
    losses.actor_loss(q, actions, torch.zeros(1, 1), torch.ones(1), 0.1, divisor)[0].backward()
    assert actions.grad.item() == pytest.approx(-1e-4 / 0.02)


def test_actor_loss_gives_each_task_a_scale_of_its_own() -> None:
    """Task 7: Q 0.02 and 0.06, mean 0.04; task 3: 0.8; task 1: 0.01, floored to 0.02.

    -(0.5 + 1.5 + 1 + 0.5) / 4 = -0.875; gradients -1 / (4 * scale): -6.25, -6.25, -0.3125, -12.5.
    A common scale, 0.2225, would give every row -1.1236.
    """
    actions = torch.tensor([[0.02], [0.06], [0.8], [0.01]], requires_grad=True)
    loss, distance = losses.actor_loss(
        actions[:, 0],
        actions,
        actions.detach(),
        torch.ones(1),
        bc_weight=1.0,
        divisor=losses.q_divisor(actions[:, 0], torch.tensor([7, 7, 3, 1])),
    )
    assert loss.item() == pytest.approx(-0.875)
    loss.backward()
    torch.testing.assert_close(actions.grad, -tensor(6.25, 6.25, 0.3125, 12.5)[:, None])


def test_smoothed_target_action_clips_noise_then_action() -> None:
    result = losses.smoothed_target_action(
        torch.tensor([[0.0, 0.95, 0.5]]),
        torch.tensor([[0.5, 0.5, -0.01]]),
        torch.tensor([0.1, 0.1, 0.03]),
    )
    torch.testing.assert_close(result, torch.tensor([[0.1, 1.0, 0.49]]))


def test_pessimistic_value_known_answer_and_gradient() -> None:
    """Advantages of two critics (0.3, 0.1): std 0.1; of another row (0.2, 0.2): 0.

    mean Q - 2 std = (0.6 + 0.2) / 2 - 0.2 = 0.2 and (0.7 + 0.3) / 2 = 0.5. d/dQ_i of the first:
    1/2 - 2 (A_i - mean A) / (n std) = 1/2 -+ 2 * 0.1 / 0.2 = -0.5 and 1.5.
    """
    q = torch.tensor([[0.6, 0.2], [0.7, 0.3]], requires_grad=True)
    reference = torch.tensor([[0.3, 0.1], [0.5, 0.1]])
    value = losses.pessimistic_value(q, reference, 2.0)
    torch.testing.assert_close(value, torch.tensor([0.2, 0.5]), atol=1e-4, rtol=0)
    value[0].backward()
    torch.testing.assert_close(q.grad[0], torch.tensor([-0.5, 1.5]), atol=1e-4, rtol=0)


def test_pessimistic_value_at_the_reference_is_the_mean() -> None:
    q = torch.tensor([[0.6, 0.2]], requires_grad=True)
    value = losses.pessimistic_value(q, q.detach().clone(), 5.0)
    torch.testing.assert_close(value, torch.tensor([0.4]), atol=1e-4, rtol=0)
    value.sum().backward()
    torch.testing.assert_close(q.grad, torch.full((1, 2), 0.5))


def test_a_target_does_not_go_beyond_its_source() -> None:
    """``tau`` times ``policy_delay`` may be more than 1."""
    source, target = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    polyak(source, target, 2.0)
    assert torch.equal(source.weight, target.weight)


def test_bfloat16_critics_keep_float32_values_and_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    exact, mixed = (CriticEnsemble(40, 56, (256, 256), 3, bf16) for bf16 in (False, True))
    mixed.load_state_dict(exact.state_dict())
    x, action = torch.randn(64, 40), torch.rand(64, 56) * 2 - 1
    values = exact(x, action)
    monkeypatch.setattr(networks, "fast_bf16", lambda _: False)
    assert torch.equal(mixed(x, action), values), "a processor without the instructions"
    monkeypatch.setattr(networks, "fast_bf16", lambda _: True)
    rounded = mixed(x, action)
    assert rounded.dtype == torch.float32
    error = (rounded - values).abs().max()
    assert 0 < error < 0.03 * values.std()
    bits = rounded.detach().view(torch.int32) & 0xFFFF  # what bfloat16 has no room for
    assert (bits != 0).float().mean() > 0.9
    for critic in (exact, mixed):
        critic(x, action).square().sum().backward()
    for weight, other in zip(exact.parameters(), mixed.parameters(), strict=True):
        assert other.dtype == other.grad.dtype == torch.float32
        assert torch.cosine_similarity(weight.grad.flatten(), other.grad.flatten(), 0) > 0.99
