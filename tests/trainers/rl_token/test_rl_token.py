"""The RL token: losses by hand, encoder, decoder, pretraining."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.rl_token import RLTokenDecoder, RLTokenEncoder, RLTokenModelConfig, load_rl_token
from vla_gym.rl_token.linear_path import rank_for
from vla_gym_trainers.rl_token.reconstruction import explained_variance, format_reports, report
from vla_gym_trainers.rl_token.train import RLTokenConfig, collect, fit

SMALL = RLTokenModelConfig(hidden_size=12, max_tokens=4, dim=16, width=32, num_heads=2)


def synthetic_states(count, seed=0):
    """States (count, 4, 12) that three hidden causes determine, the same causes in every token.

    Neighbouring tokens therefore tell almost everything about each other: the case in which a
    decoder is tempted to ignore the RL token.
    """
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(4, 3, 12))
    causes = np.random.default_rng(seed).normal(size=(count, 3))
    return torch.from_numpy(np.einsum("nc,tch->nth", causes, mix)).float()


def test_explained_variance_by_hand():
    hidden = torch.tensor([[[0.0]], [[2.0]]])
    assert explained_variance(hidden, hidden) == 1.0
    assert explained_variance(torch.ones_like(hidden), hidden) == 0.0
    assert explained_variance(torch.tensor([[[0.5]], [[1.5]]]), hidden) == 0.75


def test_batch_equals_single():
    encoder = RLTokenEncoder(SMALL).eval()
    hidden = synthetic_states(5)
    batch = encoder.encode(hidden)
    assert batch.shape == (5, 16) and not batch.requires_grad
    for i in range(5):
        torch.testing.assert_close(
            encoder.encode(hidden[i : i + 1])[0], batch[i], atol=1e-5, rtol=0
        )


def test_token_has_unit_scale_whatever_the_scale_of_the_states():
    encoder = RLTokenEncoder(SMALL).eval()
    hidden = 1000.0 + 50.0 * synthetic_states(64)
    encoder.fit_scale(hidden)
    token = encoder.encode(hidden)
    torch.testing.assert_close(token.mean(1), torch.zeros(64), atol=1e-5, rtol=0)
    torch.testing.assert_close(token.std(1, unbiased=False), torch.ones(64), atol=1e-2, rtol=0)
    assert encoder.standardise(hidden).std().item() == pytest.approx(1.0, abs=0.02)


# Fewer and more states than their 48 numbers; a first stage of full rank spans what one does.
@pytest.mark.parametrize(("count", "rank"), [(30, 0), (400, 0), (400, 12)])
def test_linear_path_starts_at_principal_components(count, rank):
    config = replace(SMALL, linear_path=True, linear_rank=rank)
    encoder = RLTokenEncoder(config).eval()
    hidden = 3.0 + synthetic_states(count)
    encoder.fit_scale(hidden)
    encoder.fit_linear_path(hidden)
    components = encoder.linear(encoder.standardise(hidden)).detach()
    states = encoder.standardise(hidden).flatten(1)
    torch.testing.assert_close(components.mean(0), torch.zeros(16), atol=1e-4, rtol=0)
    # Three causes: three components; standard deviations go with the root of the singular values.
    singular = torch.linalg.svdvals(states - states.mean(0))
    ratio = components.norm(dim=0)[:3] / singular[:3].sqrt()
    torch.testing.assert_close(ratio / ratio[0], torch.ones(3), atol=1e-3, rtol=0)
    assert components[:, 3:].norm() < 0.02 * components.norm()
    # With the readout at zero, all that the token knows is linear: the causes are read off it.
    solution = torch.linalg.lstsq(components[:, :3], states - states.mean(0)).solution
    residual = components[:, :3] @ solution - (states - states.mean(0))
    assert residual.norm() < 1e-3 * states.norm()
    token = encoder.encode(hidden)
    torch.testing.assert_close(token, torch.nn.functional.layer_norm(components, (16,)))


def test_low_rank_path_keeps_the_states_that_are_of_low_rank():
    """All four positions vary in the same three of 12 dimensions: rank 3 loses nothing."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(3, 12, generator=generator)
    # The positions' means point elsewhere, and vary more; they tell nothing.
    mean = 5.0 * torch.randn(4, 12, generator=generator)
    hidden = mean + torch.randn(300, 4, 3, generator=generator) @ basis
    for rank, lost in ((3, False), (2, True)):
        encoder = RLTokenEncoder(replace(SMALL, linear_path=True, linear_rank=rank))
        encoder.fit_scale(hidden)
        encoder.fit_linear_path(hidden)
        states = encoder.standardise(hidden)
        truth = (states - states.mean(0)).flatten(1).double()
        components = encoder.linear(states).detach().double()
        # Some components are zero: a driver that finds the rank.
        fitted = torch.linalg.lstsq(components, truth, driver="gelsd").solution
        residual = truth - components @ fitted
        share = float(residual.norm() / truth.norm())
        assert share > 0.1 if lost else share < 1e-3


def test_rank_of_the_linear_path(tmp_path):
    assert rank_for(8, 192) == rank_for(16, 4096) == 0  # 65,536 numbers and fewer: one stage
    assert rank_for(56, 4096) == 256 and rank_for(1000, 960) == 65 and rank_for(512, 130) == 128
    assert rank_for(70_000, 4096) == 1
    encoder = RLTokenEncoder(RLTokenModelConfig(4096, 56, linear_path=True))
    sizes = {name: p.numel() for name, p in encoder.linear.named_parameters()}
    assert sizes == {"weight": 56 * 256 * 256, "bias": 256, "project.weight": 256 * 4096}

    small = RLTokenEncoder(replace(SMALL, linear_path=True, linear_rank=3)).eval()
    hidden = synthetic_states(20)
    small.fit_linear_path(hidden)
    small.save_pretrained(tmp_path)
    again = RLTokenEncoder.from_pretrained(tmp_path)
    assert again.linear.project.weight.shape == (3, 12)
    for p, saved in zip(small.linear.parameters(), again.linear.parameters(), strict=True):
        assert saved.equal(p.half().float())
    small.train()(hidden)[:, 0].sum().backward()
    assert all(p.grad.abs().max() > 0 for p in small.linear.parameters())
    for rank in (-1, 13):
        with pytest.raises(ConfigError, match=f"linear_rank.*12.*{rank}"):
            replace(SMALL, linear_rank=rank)
    with pytest.raises(ConfigError, match="hidden size 192"):
        collect(RLTokenConfig(linear_rank=193))


@pytest.mark.parametrize("rank", [0, 3])
def test_missing_states_are_their_mean(rank):
    few, mean = 3.0 + synthetic_states(50)[:, :2], torch.full((50, 2, 12), 3.0)
    encoders = [RLTokenEncoder(replace(SMALL, linear_path=True, linear_rank=rank)) for _ in "ab"]
    for encoder, hidden in zip(encoders, (few, torch.cat([few, mean], 1)), strict=True):
        encoder.mean.fill_(3.0)
        encoder.fit_linear_path(hidden)
    tokens = [encoder.linear(encoder.standardise(few)) for encoder in encoders]
    torch.testing.assert_close(tokens[0].abs(), tokens[1].abs(), atol=1e-4, rtol=1e-3)
    assert tokens[0].std() > 0.1


@pytest.mark.parametrize("rank", [0, 3])
def test_states_that_tell_nothing_are_refused(rank):
    encoder = RLTokenEncoder(replace(SMALL, linear_path=True, linear_rank=rank))
    with pytest.raises(ConfigError, match="two hidden states or more, got 1"):
        encoder.fit_scale(synthetic_states(1)[:, :1])
    for count in (1, 70):
        with pytest.raises(ConfigError, match=f"differ; all {count} have the same"):
            encoder.fit_linear_path(synthetic_states(1).expand(count, -1, -1))
    with pytest.raises(ConfigError, match=r"\(B, <= 4, 12\), got \(20, 8, 12\)"):
        encoder.fit_linear_path(synthetic_states(20).repeat(1, 2, 1))
    assert all(value.isfinite().all() for value in encoder.state_dict().values())


@pytest.mark.parametrize("rank", [0, 3])
def test_linear_path_takes_missing_tokens_as_zeros(rank):
    linear = RLTokenEncoder(replace(SMALL, linear_path=True, linear_rank=rank)).linear
    torch.nn.init.normal_(linear.weight)
    states = synthetic_states(3)
    fewer = linear(states[:, :2])
    states[:, 2:] = 0.0
    torch.testing.assert_close(fewer, linear(states))


def test_decoder_is_causal():
    decoder = RLTokenDecoder(SMALL).eval()
    states, token = synthetic_states(2), torch.randn(2, 16)
    before = decoder(token, states)
    states[:, 2] += 5.0
    after = decoder(token, states)
    torch.testing.assert_close(before[:, :3], after[:, :3])
    assert (before[:, 3] - after[:, 3]).abs().max() > 1e-3
    everyone = torch.ones(2, dtype=torch.bool)
    alone = decoder(token, states, drop=everyone)
    torch.testing.assert_close(alone, decoder(token, torch.zeros_like(states), drop=everyone))


def test_generation_feeds_back_its_own_states():
    decoder = RLTokenDecoder(SMALL).eval()
    token = torch.randn(2, 16)
    states = decoder.generate(token, 4)
    torch.testing.assert_close(decoder(token, states), states, atol=1e-5, rtol=0)


def train_small(steps):
    config = RLTokenConfig(dim=16, width=32, layers=1, steps=steps, batch_size=64)
    encoder, decoder = fit(synthetic_states(2000), config)
    return report(encoder, decoder, synthetic_states(300, seed=1))


def test_pretraining_learns_a_token_that_the_decoder_needs():
    trained, fresh = train_small(steps=250), train_small(steps=1)
    assert trained["token_mse"] < 0.3 * fresh["token_mse"]
    assert trained["token_explained_variance"] > 0.7
    # Another observation's token must hurt, although the true previous states are in sight. A
    # decoder that ignores the token gives 1; five seeds gave 3.6-4.4.
    assert trained["context_wrong_token_mse"] > 2 * trained["context_mse"]


def test_round_trip_and_broken_checkpoints(tmp_path):
    encoder, decoder = RLTokenEncoder(SMALL).eval(), RLTokenDecoder(SMALL).eval()
    hidden = synthetic_states(4)
    encoder.fit_scale(hidden)
    encoder.save_pretrained(tmp_path, decoder)
    again = load_rl_token(tmp_path)
    assert (again.dim, again.hidden_size) == (16, 12)
    assert load_rl_token(str(tmp_path)) is again
    torch.testing.assert_close(again.encode(hidden), encoder.encode(hidden), atol=2e-2, rtol=0)
    RLTokenDecoder.from_pretrained(tmp_path)
    encoder.save_pretrained(tmp_path, decoder)
    assert load_rl_token(tmp_path) is not again  # what was written since

    weights = tmp_path / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(WeightsError, match="corrupt"):
        RLTokenEncoder.from_pretrained(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    weights.write_bytes(good[:100])
    with pytest.raises(WeightsError, match="Cannot read weights"):
        RLTokenEncoder.from_pretrained(tmp_path)
    encoder.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="does not fit RLTokenDecoder; .* missing"):
        RLTokenDecoder.from_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="No checkpoint 'nothing'"):
        load_rl_token("nothing")
    with pytest.raises(ConfigError, match="device 'gpu' is not there"):
        load_rl_token(tmp_path, "gpu")


def test_wrong_shapes_and_configs_are_refused():
    encoder = RLTokenEncoder(SMALL)
    with pytest.raises(ConfigError, match="Expected hidden states"):
        encoder.encode(torch.zeros(2, 5, 12))
    with pytest.raises(ConfigError, match="divisible"):
        RLTokenModelConfig(hidden_size=12, max_tokens=4, width=30)
    for count in (0, 1):  # none can be held out
        with pytest.raises(ConfigError, match="two or more .* rollout_episodes, or demos"):
            RLTokenConfig(expert_episodes=count, rollout_episodes=count).check()
    with pytest.raises(ConfigError, match="linear_rank 8 .* no-linear-path"):
        RLTokenConfig(linear_path=False, linear_rank=8).check()
    with pytest.raises(ConfigError, match="steps: expected `int` >= 1, got 0"):
        RLTokenConfig(steps=0).check()
    with pytest.raises(ConfigError, match="width"):  # before states are collected
        RLTokenConfig(width=30).check()


def test_pretraining_command_end_to_end(tmp_path, capsys):
    from mini_vla import small_config, write_demos

    from vla_gym.vla.mini.model import MiniVLA
    from vla_gym_trainers.rl_token.train import train_rl_token

    MiniVLA(small_config()).save_pretrained(tmp_path / "vla")
    write_demos(tmp_path)
    config = RLTokenConfig(
        vla=str(tmp_path / "vla"),
        suites=("goal",),
        task_ids=(5,),
        expert_episodes=2,
        rollout_episodes=0,
        demos=str(tmp_path),
        run_dir=tmp_path / "run",
        frame_stride=4,
        width=32,
        steps=20,
        compare_dropout=0.0,
        progress=False,
    )
    card = train_rl_token(config)
    assert capsys.readouterr().err == ""
    assert json.loads((tmp_path / "run" / "card.json").read_text()) == card
    results = card["results"]
    train, rest = (results["states"][key] for key in ("train", "held_out"))
    # Of two episodes of the expert one is held out; so is one of every task's demonstrations.
    assert (train["expert"] > 0) and (rest["expert"] > 0) and rest["demos"] > 0
    assert train["vla"] == rest["vla"] == 0 and results["hidden_shape"] == [8, 32]
    assert [token["context_dropout"] for token in results["tokens"]] == [0.5, 0.0]
    table = format_reports(card)
    assert "context dropout 0.5 | context dropout 0 |" in table and table.count("\n") == 6
    assert table in (tmp_path / "run" / "model" / "README.md").read_text()
    assert load_rl_token(tmp_path / "run" / "model").config.context_dropout == 0.5
