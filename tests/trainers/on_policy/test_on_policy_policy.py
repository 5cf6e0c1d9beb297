"""The VLA as a policy over tokens: draws, values, copies that share and copies that do not."""

import copy
import itertools

import numpy as np
import pytest
import torch
from mini_vla import random_inputs, small_config
from on_policy_toys import LORA, keys_of

from vla_gym.errors import ConfigError
from vla_gym.vla.base import TrainableTokenVLA
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym.vla.mini.model import MiniVLA
from vla_gym_trainers.on_policy.distributions import (
    CorrelatedTokens,
    TokenDistribution,
    draw_tokens,
    keyed_uniform,
)
from vla_gym_trainers.on_policy.policy import ValueHead
from vla_gym_trainers.on_policy.student import trainable_copy
from vla_gym_trainers.on_policy.vla_policy import TokenPolicy


@pytest.fixture
def vla():
    torch.manual_seed(0)
    return MiniBackend(MiniVLA(small_config()))


def observed(policy, count):
    """Observations and instructions as a policy takes them."""
    frames, texts, proprio = random_inputs(count)
    raw = {**frames, "proprio": proprio, "task_id": np.zeros(count, np.int64)}
    return policy.observe(raw, texts), texts


def test_draws_follow_the_softmax():
    # Probabilities 0.2 and 0.8 at T = 1; at T = 0.5 the odds 1:4 become 1:16.
    logits = torch.full((256,), -1e9)
    logits[3], logits[7] = np.log(0.2), np.log(0.8)
    uniform = keyed_uniform(keys_of(1), [20_000])[0]
    for temperature, expected in ((1.0, 0.2), (0.5, 1 / 17)):
        tokens = draw_tokens(logits.expand(20_000, 256), uniform, temperature)
        assert set(tokens.tolist()) == {3, 7}
        assert float((tokens == 3).float().mean()) == pytest.approx(expected, abs=0.01)
    edges = torch.tensor([0.0, 0.1999, 0.2001, 1.0 - 1e-16], dtype=torch.float64)
    assert draw_tokens(logits.expand(4, 256), edges, 1.0).tolist() == [3, 3, 7, 7]


def test_a_row_is_drawn_by_its_key_alone():
    keys = keys_of(3)
    uniform = keyed_uniform(keys, (8, 7))
    assert torch.equal(keyed_uniform(keys[[2, 0]], (8, 7)), uniform[[2, 0]])
    assert len({float(row.sum()) for row in uniform}) == 3
    assert keyed_uniform(np.empty((0, 2), int), (8, 7)).shape == (0, 8, 7)


def test_acting_and_evaluating_agree(vla):
    assert isinstance(vla, TrainableTokenVLA)
    policy = TokenPolicy(vla, temperature=1.3, value_head=ValueHead(vla.hidden_size))
    torch.nn.init.normal_(policy.value_head.fc2.weight)
    frames, texts, proprio = random_inputs(3)
    inputs = observed(policy, 3)
    assert inputs[0]["wrist"].shape == (3, 64, 64, 3)
    act = policy.act(*inputs, keys_of(3))
    full = {**frames, "proprio": proprio}, texts
    assert torch.equal(act.sample, policy.act(*full, keys_of(3)).sample)
    assert torch.equal(act.actions, vla.tokens_to_actions(act.sample))
    seen, value_input = policy.distribution(*inputs)
    assert torch.equal(seen.log_prob(act.sample.to(torch.uint8)), act.log_probs)
    assert torch.equal(policy.values_of(value_input, 3), act.values)
    torch.testing.assert_close(
        act.log_probs, vla.token_log_probs(frames, texts, proprio, act.sample, 1.3)
    )
    greedy = policy.act(*inputs)
    assert torch.equal(greedy.sample, seen.mode())
    assert torch.equal(greedy.sample, vla.act_tokens(frames, texts, proprio, 0.0)[0])
    torch.testing.assert_close(policy.values(*inputs), act.values)
    # Tokens of control steps that were not executed took no part.
    mask = policy.factor_mask(torch.tensor([0, 3, 8]))
    assert mask.sum(dim=(1, 2)).tolist() == [0, 21, 56] and mask[1, :3].all()
    # The bins of the executed actions are the tokens, but for the gripper, which is a switch, and
    # for bin 255, whose centre is that of 254.
    back = vla.actions_to_tokens(act.actions)[..., :6]
    assert torch.equal(back, act.sample[..., :6].clamp(max=254))


def test_a_fresh_value_head_is_zero_and_leaves_the_trunk_alone(vla):
    vla.model.requires_grad_(True)
    policy = TokenPolicy(vla, value_head=ValueHead(vla.hidden_size))
    inputs = observed(policy, 2)
    assert not policy.values(*inputs).any()
    torch.nn.init.normal_(policy.value_head.fc2.weight)
    vla.model.zero_grad()
    policy.values_of(policy.distribution(*inputs)[1], 2).sum().backward()
    assert policy.value_head.fc1.weight.grad.any() and vla.model.queries.grad is None


def test_entropy():
    uniform = TokenDistribution(torch.zeros(2, 256)).entropy()
    assert uniform.tolist() == pytest.approx([np.log(256)] * 2)
    # Probabilities 0.2 and 0.8; at T = 0.5 the odds 1:4 become 1:16.
    logits = torch.full((256,), -1e9)
    logits[3], logits[7] = np.log(0.2), np.log(0.8)
    for temperature, p in ((1.0, 0.2), (0.5, 1 / 17)):
        expected = -p * np.log(p) - (1 - p) * np.log(1 - p)
        found = TokenDistribution(logits, temperature).entropy()
        assert found.item() == pytest.approx(expected, abs=1e-5)


def test_correlated_tokens_are_drawn_as_their_log_probabilities_say():
    """All 64 chunks of three steps of a token with four bins, and its derivatives."""
    logits = torch.randn(1, 3, 1, 4, generator=torch.manual_seed(1), dtype=torch.float64)
    chunks = torch.tensor(list(itertools.product(range(4), repeat=3)))[..., None]
    p = CorrelatedTokens(logits.expand(64, -1, -1, -1), 1.3, 0.8).log_prob(chunks)
    p = p.double().sum(dim=(1, 2)).exp()
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-5)
    count = 20_000
    drawn = CorrelatedTokens(logits.expand(count, -1, -1, -1), 1.3, 0.8).draw(keys_of(count))
    number = (drawn[:, :, 0] * torch.tensor([16, 4, 1])).sum(dim=1)
    found = number.bincount(minlength=64)
    # 63 degrees of freedom; 0.001 of such sums are above 103.
    assert float(((found - count * p).square() / (count * p)).sum()) < 103.0
    # As without correlation in the first step, and nearly so everywhere without much of it.
    independent, hardly = TokenDistribution(logits, 1.3), CorrelatedTokens(logits, 1.3, 1e-6)
    for chunk in chunks[::9, None]:
        expected = independent.log_prob(chunk[0][None])
        torch.testing.assert_close(hardly.log_prob(chunk[0][None]), expected, check_dtype=False)

    def total(x):
        return CorrelatedTokens(x, 1.0, 0.7).log_prob(drawn[:5]).double().sum()

    x = torch.randn(5, 3, 1, 4, generator=torch.manual_seed(2), dtype=torch.float64)
    (slope,) = torch.autograd.grad(total(x.requires_grad_()), x)
    step = torch.randn(x.shape, generator=torch.manual_seed(3), dtype=torch.float64) * 1e-3
    change = total(x.detach() + step) - total(x.detach() - step)
    assert float(change) == pytest.approx(2.0 * float((slope * step).sum()), rel=1e-3)


def test_correlated_tokens_move_on_in_one_direction(vla):
    white, moving = (TokenPolicy(vla, correlation=rho) for rho in (0.0, 0.9))
    frames, texts, proprio = random_inputs(1)
    raw = {**frames, "proprio": proprio, "task_id": np.zeros(1, np.int64)}
    many = {key: np.repeat(value, 300, axis=0) for key, value in raw.items()}
    inputs = white.observe(many, texts * 300), texts * 300
    means = [p.act(*inputs, keys_of(300)).actions[..., :6].mean(dim=1) for p in (white, moving)]
    assert (means[1].std(dim=0) > 1.5 * means[0].std(dim=0)).all()
    # Also of bins of hardly any probability, to both sides, with a derivative.
    steep = torch.linspace(-80.0, 80.0, 256).repeat(2, 8, 7, 1)
    steep[1] *= -1.0
    far = CorrelatedTokens(steep.requires_grad_(), 1.0, 0.9)
    far.log_prob(torch.arange(0, 256, 5)[:8, None].expand(2, 8, 7)).sum().backward()
    assert steep.grad.isfinite().all()


@pytest.mark.parametrize("what", ["lora", "heads", "full"])
def test_training_a_copy_leaves_the_original_and_twins_alone(vla, what):
    before = copy.deepcopy(vla.model.state_dict())
    student, adapters = trainable_copy(vla, what, lora=LORA)
    assert (adapters is not None) == (what == "lora")
    policy = TokenPolicy(student, value_head=ValueHead(vla.hidden_size))
    inputs, twin = observed(policy, 2), policy.copy()
    names = policy.named_parameters()
    assert names.keys() == twin.named_parameters().keys()
    if what == "heads":
        assert {n for n in names if n.startswith("vla.")} == {
            "vla.token_head.weight",
            "vla.token_head.bias",
        }
    start = policy.act(*inputs, keys_of(2))
    optimizer = torch.optim.SGD(names.values(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        policy.distribution(*inputs)[0].log_prob(start.sample).mean().neg().backward()
        optimizer.step()
    moved = policy.act(*inputs, keys_of(2))
    assert (moved.log_probs - start.log_probs).abs().max() > 1e-3
    assert torch.equal(twin.act(*inputs, keys_of(2)).log_probs, start.log_probs)
    assert all(torch.equal(v, before[k]) for k, v in vla.model.state_dict().items())

    twin.load_state_dict(policy.state_dict())
    assert torch.equal(twin.act(*inputs, keys_of(2)).log_probs, moved.log_probs)
    state = policy.state_dict()
    fresh = TokenPolicy(trainable_copy(vla, what, lora=LORA)[0], value_head=ValueHead(32))
    fresh.load_state_dict(state)
    assert torch.equal(fresh.act(*inputs, keys_of(2)).log_probs, moved.log_probs)
    state.popitem()
    with pytest.raises(ConfigError, match="1 differ"):
        fresh.load_state_dict(state)


def test_lora_and_twins_share_what_is_frozen(vla):
    policy = TokenPolicy(trainable_copy(vla, "lora", lora=LORA)[0])
    for other in (policy.vla, policy.copy().vla):
        assert other.model.queries is vla.model.queries
        assert other.model.blocks[0].fc1.base_layer.weight is vla.model.blocks[0].fc1.weight
    lora_a = policy.vla.model.blocks[0].fc1.lora_A["default"].weight
    assert policy.copy().vla.model.blocks[0].fc1.lora_A["default"].weight is not lora_a


def test_fresh_heads_are_trained_whole(vla):
    inputs = random_inputs(2)
    for what in ("lora", "heads"):
        student, _ = trainable_copy(vla, what, lora=LORA, fresh_heads=True)
        policy = TokenPolicy(student)
        names = [n for n in policy.named_parameters() if "token_head" in n and "lora" not in n]
        assert len(names) == 2
        fresh, old = (model.token_outputs(*inputs).logits for model in (student, vla))
        assert (fresh - old).abs().max() > 0.05
        torch.testing.assert_close(student.infer(*inputs).actions, vla.infer(*inputs).actions)


def test_mistakes_are_named(vla):
    with pytest.raises(ConfigError, match="token_outputs"):
        TokenPolicy(object())
    with pytest.raises(ConfigError, match="no heads lm_head; its modules are .*token_head"):
        trainable_copy(vla, "heads", heads=("lm_head",))
    with pytest.raises(ConfigError, match="MiniVLA cannot be given"):
        trainable_copy(vla, "heads", heads=("",), fresh_heads=True)
