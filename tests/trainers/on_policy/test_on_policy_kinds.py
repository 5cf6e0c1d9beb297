"""Policies that are the VLA itself: a normal distribution, a noisy flow, a distribution of its own.

Known answers: torch.distributions, numerical integration, a flow whose marginals are known.
"""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from on_policy_toys import collected, keys_of, random_targets, tiny_vla
from test_on_policy_policy import observed
from test_on_policy_train import run
from torch.distributions import MultivariateNormal, Normal

from vla_gym.errors import ConfigError
from vla_gym.vla.base import FlowOutput, TrainableVLA
from vla_gym.vla.lora import LoraSettings
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.distributions import GaussianChunk
from vla_gym_trainers.on_policy.flow_chain import FlowChain
from vla_gym_trainers.on_policy.flow_policy import FlowPolicy
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.minibatches import gather
from vla_gym_trainers.on_policy.networks import describe, make_networks
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.policy import ValueHead
from vla_gym_trainers.on_policy.student import checkpoint_layers, trainable_copy
from vla_gym_trainers.on_policy.vla_policy import GaussianPolicy, OwnPolicy, TokenPolicy

HEADS = {
    "tokens": "token_head",
    "gaussian": "action_head",
    "flow": "flow_head",
    "own": "action_head",
}
SIGMAS = (0.1, 0.1, 0.1, 0.03, 0.03, 0.03, 0.1)


class OwnVLA(MiniBackend):
    """Moves by a normal distribution around tanh of what its L1 head says."""

    sample_shape = factors = (8, 7)
    sample_dtype = torch.float32

    def distribution(self, images, instructions, proprio):
        hidden, actions = self.action_outputs(images, instructions, proprio)
        return GaussianChunk(actions.tanh(), torch.full((7,), -1.0)), hidden.mean(dim=1)

    def sample_to_env(self, sample):
        return sample.clamp(-1.0, 1.0)


def student(kind="flow", what="lora"):
    vla = tiny_vla(flow_layers=1)
    if kind == "own":
        vla = OwnVLA(vla.model)
    lora = LoraSettings(r=4, exclude=tuple(set(HEADS.values()) - {HEADS[kind]}))
    return trainable_copy(vla, what, lora=lora, heads=(HEADS[kind],))[0]


def policy_of(kind, what="lora", **options):
    vla = student(kind, what)
    torch.manual_seed(1)
    options["value_head"] = ValueHead(vla.hidden_size, 16)
    if kind == "gaussian":
        return GaussianPolicy(vla, sigmas=SIGMAS, **{"correlation": 0.5, **options})
    if kind == "flow":
        return FlowPolicy(vla, **{"correlation": 0.5, **options})
    return {"own": OwnPolicy, "tokens": TokenPolicy}[kind](vla, **options)


@pytest.fixture(scope="module")
def rollout():
    """Played by ``policy_of("gaussian")``."""
    return collected(policy_of("gaussian"), seed=3)


# The normal distribution


def covariance(size, sigma, rho):
    steps = torch.arange(size)
    return sigma**2 * rho ** (steps[:, None] - steps).abs().double()


@pytest.mark.parametrize("rho", [0.0, 0.8])
def test_a_chunks_density_is_torchs_also_of_its_first_steps_alone(rho):
    generator = torch.Generator().manual_seed(0)
    mean, sample = (torch.randn(2, 5, 3, generator=generator).double() for _ in range(2))
    sigma = torch.tensor([0.1, 0.5, 2.0]).double()
    chunk = GaussianChunk(mean, sigma.log(), rho)
    for steps in (1, 3, 5):
        for number in range(3):
            known = MultivariateNormal(
                mean[:, :steps, number], covariance(steps, sigma[number], rho)
            )
            factors = chunk.log_prob(sample)[:, :steps, number]
            torch.testing.assert_close(
                factors.sum(dim=1), known.log_prob(sample[:, :steps, number])
            )
            entropy = chunk.entropy()[:, :steps, number].sum(dim=1)
            torch.testing.assert_close(entropy, known.entropy())
    if rho == 0.0:
        torch.testing.assert_close(chunk.log_prob(sample), Normal(mean, sigma).log_prob(sample))


def test_draws_have_the_density():
    chunk = GaussianChunk(torch.zeros(20_000, 4, 1), torch.tensor([math.log(0.5)]), 0.8)
    drawn = chunk.draw(np.arange(20_000)[:, None])[..., 0].double()
    torch.testing.assert_close(drawn.T.cov(), covariance(4, 0.5, 0.8), atol=0.01, rtol=0)
    few = GaussianChunk(torch.zeros(2, 4, 1), torch.tensor([math.log(0.5)]), 0.8)
    assert torch.equal(few.draw(np.array([[7], [3]]))[..., 0].double(), drawn[[7, 3]])


# The flow


def known_flow(batch, mean=0.7, spread=0.3, steps=1):
    """The flow from N(0, 1) to N(mean, spread^2 R), R_ij = 0.5^|i - j|, exactly."""
    eye, wanted = torch.eye(steps).double(), covariance(steps, spread, 0.5)

    def velocity(x, time):
        total = (1 - time) ** 2 * eye + time**2 * wanted
        centred = (x - time * mean).transpose(1, 2) @ torch.linalg.inv(total)
        action = mean + (centred @ (time * wanted)).transpose(1, 2)
        noise = (centred @ ((1 - time) * eye)).transpose(1, 2)
        return x, action - noise

    return FlowOutput(velocity, torch.zeros(batch, steps, 1).double())


@pytest.mark.parametrize(("noise", "rho"), [(0.7, 0.0), (1.0, 0.9)])
def test_noise_leaves_the_flows_marginals_as_they_are(noise, rho):
    count, num_steps = 20_000, 100
    chain = FlowChain(
        known_flow(count, steps=2), num_steps, num_steps, noise, action_size=1, correlation=rho
    )
    drawn = chain.draw(np.arange(count)[:, None])[..., 0]
    for at in (25, 50, 100):
        time = at / num_steps
        known = (1 - time) ** 2 * torch.eye(2) + time**2 * covariance(2, 0.3, 0.5)
        torch.testing.assert_close(drawn[:, at].T.cov(), known.double(), atol=0.015, rtol=0.03)
        mean = torch.full((2,), 0.7 * time).double()
        torch.testing.assert_close(drawn[:, at].mean(dim=0), mean, atol=0.015, rtol=0)


def test_a_chains_density_is_torchs_and_integrates_to_one():
    grid = torch.linspace(-4.0, 4.0, 801).double()
    first, second = torch.meshgrid(grid, grid, indexing="ij")
    count = first.numel()
    chain = FlowChain(known_flow(count), 2, 2, 0.8, action_size=1)
    points = torch.stack([torch.full((count,), 0.4).double(), first.flatten(), second.flatten()], 1)
    log_prob = chain.log_prob(points[..., None, None])
    assert log_prob.shape == (count, 2, 1, 1)
    density = log_prob.flatten(1).sum(dim=1).exp().reshape(801, 801)
    cell = float(grid[1] - grid[0]) ** 2
    assert float(density.sum()) * cell == pytest.approx(1.0, abs=1e-4)
    # What comes out at the end, by integrating over the point between, is what is drawn.
    end = density.sum(dim=0) * cell / float(density.sum() * cell)
    mean = float((end * grid).sum())
    spread = math.sqrt(float((end * (grid - mean) ** 2).sum()))
    many = FlowChain(known_flow(20_000), 2, 2, 0.8, action_size=1)
    x = torch.full((20_000, 1, 1), 0.4).double()
    noise = torch.randn(2, 20_000, 1, 1, generator=torch.Generator().manual_seed(3)).double()
    for k in range(2):
        center, std = many._step(x, k)
        known = Normal(center, std)
        x = center + std * noise[k]
        torch.testing.assert_close(
            many._gaussian(center, std).log_prob(x), known.log_prob(x), atol=1e-9, rtol=1e-9
        )
    assert float(x.mean()) == pytest.approx(mean, abs=0.01)
    assert float(x.std()) == pytest.approx(spread, abs=0.01)


def test_a_chain_with_fewer_noisy_steps_ends_as_the_flow():
    chain = FlowChain(known_flow(4), 4, 2, 0.5, action_size=1)
    drawn = chain.draw(np.arange(4)[:, None])
    assert drawn.shape == (4, 5, 1, 1) and chain.log_prob(drawn).shape == (4, 2, 1, 1)
    _, velocity = chain.flow.velocity(drawn[:, 3], 0.75)
    torch.testing.assert_close(drawn[:, 4], drawn[:, 3] + velocity / 4)
    _, velocity = chain.flow.velocity(drawn[:, 1], 0.25)
    assert (drawn[:, 2] - drawn[:, 1] - velocity / 4).abs().min() > 1e-4


def test_a_chain_with_a_fixed_start_begins_where_greedy_acting_does():
    drawn, fixed = (
        FlowChain(known_flow(4), 4, 4, 0.5, action_size=1, fixed_start=fixed)
        for fixed in (False, True)
    )
    keys = np.arange(4)[:, None]
    assert (drawn.draw(keys)[:, 0] != drawn.flow.start).any()
    chains = fixed.draw(keys)
    torch.testing.assert_close(chains[:, 0], fixed.mode()[:, 0], atol=0.0, rtol=0.0)
    steps = (chains - fixed.mode())[:, 1:]
    assert (steps != 0.0).all()
    torch.testing.assert_close(drawn.log_prob(chains), fixed.log_prob(chains))


def test_what_pads_an_action_follows_the_flow():
    start = torch.zeros(2, 3, 4)
    chain = FlowChain(FlowOutput(lambda x, _: (x, 1.0 - x), start), 2, 2, 0.5, action_size=3)
    drawn = chain.draw(keys_of(2))
    padding = drawn[..., 3]
    torch.testing.assert_close(padding[:, 1], padding[:, 0] + (1.0 - padding[:, 0]) / 2)
    assert chain.log_prob(drawn).shape == chain.entropy().shape == (2, 2, 3, 3)


# Policies


@pytest.mark.parametrize("kind", HEADS)
def test_greedy_is_what_the_vla_does_and_ratios_begin_at_one(kind):
    policy = policy_of(kind)
    inputs = observed(policy, 3)
    greedy, drawn = policy.act(*inputs), policy.act(*inputs, keys_of(3))
    seen, features = policy.distribution(*inputs)
    assert torch.equal(seen.log_prob(drawn.sample), drawn.log_probs)  # so the first ratio is 1
    assert drawn.log_probs.shape == (3, *policy.factors) == seen.entropy().shape
    assert drawn.sample.shape == (3, *policy.sample[0]) and features.shape == (3, 32)
    assert drawn.actions.abs().max() <= 1.0 and not torch.equal(drawn.actions, greedy.actions)
    turned = policy.act(*observed(policy, 3), keys_of(3))
    assert torch.equal(turned.sample, drawn.sample)
    if kind != "own":
        vla = policy.vla
        vla.head = {"tokens": "token", "gaussian": "l1", "flow": "flow"}[kind]
        frames = {camera: inputs[0][camera] for camera in ("agentview", "wrist")}
        expected = vla.infer(frames, inputs[1], inputs[0]["proprio"]).actions
        torch.testing.assert_close(greedy.actions, expected)


@pytest.mark.parametrize("kind", HEADS)
def test_a_rollouts_first_update_has_ratios_of_one(kind):
    policy = policy_of(kind)
    rollout = collected(policy, seed=3)
    valid = rollout.data["valid"]
    targets = torch.ones(rollout.data.shape), valid, torch.ones(rollout.data.shape)
    learner = Learner(policy, PPOConfig(entropy_coef=0.01))
    sums, counts = learner.gradient(rollout, gather(policy, rollout, *targets, Phase()), Phase())
    assert sums["deviation"] / counts["policy_loss"] < 1e-5 and sums["clipped"] == 0
    assert counts["policy_loss"] == policy.factor_mask(rollout.data["executed"][valid]).sum()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in learner.parameters)


def test_steps_that_were_never_executed_carry_no_gradient():
    executed, policy = torch.tensor([3, 8]), policy_of("gaussian", correlation=0.8)
    mean = torch.zeros(2, 8, 7, requires_grad=True)
    factors = GaussianChunk(mean, torch.zeros(7), 0.8).log_prob(torch.randn(2, 8, 7))
    factors[policy.factor_mask(executed)].sum().backward()
    assert mean.grad[0, :3].all() and not mean.grad[0, 3:].any() and mean.grad[1].all()

    policy = policy_of("flow", correlation=0.8)
    velocity = torch.zeros(2, 8, 7, requires_grad=True)
    chain = FlowChain(
        FlowOutput(lambda x, _: (x, velocity), torch.zeros(2, 8, 7)), 5, 5, 0.5, action_size=7
    )
    sample = torch.randn(2, 6, 8, 7)
    chain.log_prob(sample)[policy.factor_mask(executed)].sum().backward()
    assert velocity.grad[0, :3].all() and not velocity.grad[0, 3:].any() and velocity.grad[1].all()


@pytest.mark.parametrize(
    ("kind", "what", "expected"),
    [
        ("gaussian", "heads", {"vla.action_head", "noise"}),
        ("flow", "heads", {"vla.flow_head"}),
        ("gaussian", "full", {"vla", "noise"}),
    ],
)
def test_what_is_trained_is_what_was_asked_for(kind, what, expected):
    policy = policy_of(kind, what)
    names = {n for n in policy.named_parameters() if not n.startswith("value_head.")}
    assert all(any(n.startswith(f"{e}.") for e in expected) for n in names)
    assert all(any(n.startswith(f"{e}.") for n in names) for e in expected)


def test_sigma_is_learned_kept_above_its_floor_or_fixed():
    policy = policy_of("gaussian", min_sigma=0.5)
    assert torch.allclose(policy.noise.log_std.exp(), torch.tensor(SIGMAS))
    with torch.no_grad():
        policy.noise.log_std -= 5.0
    policy.bound()
    assert torch.allclose(policy.noise.log_std.exp(), 0.5 * torch.tensor(SIGMAS))
    with torch.no_grad():
        policy.noise.log_std += 5.0
    policy.bound()
    assert (policy.noise.log_std.exp() > torch.tensor(SIGMAS)).all()
    policy.noise_share = 0.75
    policy.bound()
    assert torch.allclose(policy.noise.log_std.exp(), 0.75 * torch.tensor(SIGMAS))
    assert "noise.log_std" not in policy_of("gaussian", learn_sigma=False).named_parameters()
    state = policy.state_dict()
    state["noise.log_std"][2] = float("nan")
    with pytest.raises(ConfigError, match="not finite: noise.log_std"):
        policy.load_state_dict(state)


def test_layers_that_are_computed_again_give_the_same_gradients():
    gradients = []
    for again in (False, True):
        policy = policy_of("flow", "full")
        if again:
            layers = torch.nn.ModuleList([policy.vla.model.blocks[0]] * 2)
            policy.vla.model.blocks = layers  # two, so that they are a stack
            checkpoint_layers(policy.vla)
            twin = policy.copy()
            assert twin.vla.model.blocks[0].forward.args[0] is twin.vla.model.blocks[0]
        else:
            policy.vla.model.blocks.append(policy.vla.model.blocks[0])
        inputs = observed(policy, 3)
        sample = policy.act(*inputs, keys_of(3)).sample
        policy.distribution(*inputs)[0].log_prob(sample).sum().backward()
        gradients.append(policy.vla.model.blocks[0].fc1.weight.grad.clone())
    assert gradients[0].any()
    torch.testing.assert_close(*gradients)


def test_dropout_is_on_while_learning_only():
    vla = tiny_vla()
    lora = LoraSettings(r=4, dropout=0.5, exclude=("action_head",))
    policy = TokenPolicy(trainable_copy(vla, "lora", lora=lora)[0])
    with torch.no_grad():  # fresh adapters add nothing
        for name, p in policy.named_parameters().items():
            if "lora_B" in name:
                p.normal_()
    inputs = observed(policy, 3)
    calm = policy.act(*inputs).log_probs
    policy.set_dropout(True)
    assert not torch.equal(policy.act(*inputs).log_probs, calm)
    policy.set_dropout(False)
    assert torch.equal(policy.act(*inputs).log_probs, calm)


def test_an_update_keeps_sigma_below_its_share(rollout):
    policy = policy_of("gaussian")
    learner = Learner(policy, PPOConfig(policy="gaussian", sigma=0.1, num_minibatches=1))
    policy.noise_share = 0.5
    learner.update(rollout, *random_targets(rollout))
    assert torch.allclose(policy.noise.log_std.exp(), 0.5 * torch.tensor(SIGMAS))


def test_sigma_has_a_learning_rate_of_its_own(rollout):
    moved = []
    for rate in (None, 0.02):
        policy = policy_of("gaussian")
        before = {n: p.detach().clone() for n, p in policy.named_parameters().items()}
        settings = {"policy": "gaussian", "sigma": 0.1, "num_minibatches": 1}
        config = PPOConfig(**settings, learning_rate=1e-4, sigma_learning_rate=rate)
        Learner(policy, config).update(rollout, *random_targets(rollout))
        moved.append({n: p.detach() - before[n] for n, p in policy.named_parameters().items()})
    plain, own = moved
    assert plain["noise.log_std"].abs().max() > 0.0
    for name, change in plain.items():
        share = 200.0 if name == "noise.log_std" else 1.0
        torch.testing.assert_close(own[name], share * change, rtol=2e-3, atol=1e-7)


def test_an_update_without_memory_is_skipped_and_counted(rollout, monkeypatch):
    policy, targets = policy_of("gaussian"), random_targets(rollout)
    learner = Learner(policy, PPOConfig(num_minibatches=2))
    calls, distribution = [], policy.distribution

    def short(*inputs):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        return distribution(*inputs)

    monkeypatch.setattr(policy, "distribution", short)
    metrics = learner.update(rollout, *targets)
    assert metrics["train/out_of_memory"] == 1 and metrics["train/updates"] == 1
    assert learner.out_of_memory == 1

    def never(*inputs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(policy, "distribution", never)
    with pytest.raises(ConfigError, match="smaller micro_batch_size"):
        learner.update(rollout, *targets)


def test_mistakes_are_named():
    plain = tiny_vla()
    own = copy.copy(plain)
    for make, words in (
        (
            lambda: OwnPolicy(own),
            "own: its backend lacks distribution, factors, sample_dtype, sample_shape",
        ),
        (lambda: FlowPolicy(plain), "no flow head"),
        (lambda: GaussianPolicy(object(), sigmas=SIGMAS), "action_outputs"),
        (lambda: GaussianPolicy(plain, sigmas=(float("nan"),) * 7), "positive numbers"),
        (lambda: FlowPolicy(student(), stochastic_steps=0), "stochastic_steps must be in 1..5"),
        (lambda: FlowPolicy(student(), stochastic_steps=6), "stochastic_steps must be in 1..5"),
    ):
        with pytest.raises(ConfigError, match=words):
            make()
    assert isinstance(student("own"), TrainableVLA)


@pytest.mark.parametrize("kind", ["gaussian", "flow"])
def test_networks_of_a_configuration(kind):
    config = PPOConfig(policy=kind, trainable="heads", noise_correlation=0.9, sigma=0.1)
    parts = make_networks(config, tiny_vla(flow_layers=1))
    assert config.trained_heads() == (HEADS[kind],)
    # A preset is made before the command line says which policy.
    other = {"gaussian": "flow", "flow": "gaussian"}[kind]
    assert replace(config, policy=other).trained_heads() == (HEADS[other],)
    assert HEADS[kind] not in config.heads_without_adapters()
    assert "parameters are trained" in describe(parts.policy)
    if kind == "gaussian":
        expected = [0.1] * 3 + [0.03] * 3 + [0.1]
        assert parts.policy.noise.log_std.exp().tolist() == pytest.approx(expected)
    inputs = observed(parts.policy, 3)
    torch.testing.assert_close(parts.teacher(*inputs).actions, parts.policy.act(*inputs).actions)


@pytest.mark.parametrize("kind", ["flow", "own"])
def test_a_run_saves_adapters_and_a_vla_of_the_package(kind, tmp_path):
    vla = tiny_vla(flow_layers=1)
    vla = OwnVLA(vla.model) if kind == "own" else vla
    run(PPOConfig, tmp_path / "run", vla, policy=kind, total_steps=80)
    assert (tmp_path / "run" / "adapters").is_dir()
    assert (tmp_path / "run" / "vla").is_dir() == (kind != "own")  # which is another class
