"""The RL token: losses by hand, encoder, decoder, pretraining."""

import numpy as np
import pytest
import torch

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.rl_token import (
    RLTokenDecoder,
    RLTokenEncoder,
    RLTokenModelConfig,
    explained_variance,
    load_rl_token,
    reconstruction_loss,
)
from vla_gym_trainers.rl_token import RLTokenConfig, fit, report, split_sources

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


def test_reconstruction_loss_by_hand():
    predicted = torch.tensor([[[1.0, 1.0], [0.0, 2.0]]])
    hidden = torch.zeros(1, 2, 2, requires_grad=True)
    # Token errors: mean(1, 1) = 1 and mean(0, 4) = 2.
    assert reconstruction_loss(predicted, hidden).item() == 1.5
    assert reconstruction_loss(predicted, hidden, torch.tensor([[True, False]])).item() == 1.0
    predicted.requires_grad_()
    reconstruction_loss(predicted, hidden).backward()
    assert hidden.grad is None


def test_explained_variance_by_hand():
    hidden = torch.tensor([[[0.0]], [[2.0]]])
    assert explained_variance(hidden, hidden) == 1.0
    assert explained_variance(torch.ones_like(hidden), hidden) == 0.0
    assert explained_variance(torch.tensor([[[0.5]], [[1.5]]]), hidden) == 0.75
    masked = torch.tensor([[True], [False]])
    assert explained_variance(torch.tensor([[[0.0]], [[9.0]]]), hidden, masked) == 1.0


def test_batch_equals_single():
    encoder = RLTokenEncoder(SMALL).eval()
    hidden = synthetic_states(5)
    batch = encoder.encode(hidden)
    assert batch.shape == (5, 16) and not batch.requires_grad
    for i in range(5):
        torch.testing.assert_close(
            encoder.encode(hidden[i : i + 1])[0], batch[i], atol=1e-5, rtol=0
        )


def test_masked_tokens_do_not_matter():
    encoder = RLTokenEncoder(SMALL).eval()
    hidden = synthetic_states(3)
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    other = hidden.clone()
    other[1, 2:] = 100.0
    torch.testing.assert_close(encoder.encode(hidden, mask), encoder.encode(other, mask))
    torch.testing.assert_close(
        encoder.encode(hidden, mask)[1], encoder.encode(hidden[1:2, :2])[0], atol=1e-5, rtol=0
    )


def test_token_has_unit_scale_whatever_the_scale_of_the_states():
    encoder = RLTokenEncoder(SMALL).eval()
    hidden = 1000.0 + 50.0 * synthetic_states(64)
    encoder.fit_scale(hidden)
    token = encoder.encode(hidden)
    torch.testing.assert_close(token.mean(1), torch.zeros(64), atol=1e-5, rtol=0)
    torch.testing.assert_close(token.std(1, unbiased=False), torch.ones(64), atol=1e-2, rtol=0)
    assert encoder.standardise(hidden).std().item() == pytest.approx(1.0, abs=0.02)


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


def train_small(context_dropout, steps=250):
    config = RLTokenConfig(
        dim=16, width=32, layers=1, context_dropout=context_dropout, steps=steps, batch_size=64
    )
    encoder, decoder = fit(synthetic_states(2000), config)
    return report(encoder, decoder, synthetic_states(300, seed=1))


def test_pretraining_learns_a_token_that_the_decoder_needs():
    trained = train_small(context_dropout=0.5)
    fresh = train_small(context_dropout=0.5, steps=1)
    assert trained["token_mse"] < 0.3 * fresh["token_mse"]
    assert trained["token_explained_variance"] > 0.7
    # Another observation's token must hurt, although the true previous states are in sight. A
    # decoder that ignores the token gives 1; five seeds gave 3.6-4.4.
    assert trained["context_wrong_token_mse"] > 2 * trained["context_mse"]


def test_without_context_dropout_the_token_alone_is_worse():
    with_dropout, without = train_small(0.5), train_small(0.0)
    assert without["token_mse"] > 2 * with_dropout["token_mse"]


def test_split_keeps_whole_blocks_apart():
    train, rest = split_sources({"a": torch.arange(10.0), "b": torch.arange(20.0)}, 0.2)
    assert train.tolist() == [*range(8), *range(16)]
    assert rest.tolist() == [8, 9, *range(16, 20)]


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

    weights = tmp_path / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(WeightsError, match="corrupt"):
        RLTokenEncoder.from_pretrained(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    weights.write_bytes(good[:100])
    with pytest.raises(WeightsError, match="Cannot load"):
        RLTokenEncoder.from_pretrained(tmp_path)
    encoder.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="no fitting decoder"):
        RLTokenDecoder.from_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="No checkpoint 'nothing'"):
        load_rl_token("nothing")


def test_wrong_shapes_and_configs_are_refused():
    encoder = RLTokenEncoder(SMALL)
    with pytest.raises(ConfigError, match="Expected hidden states"):
        encoder.encode(torch.zeros(2, 5, 12))
    with pytest.raises(ConfigError, match="divisible"):
        RLTokenModelConfig(hidden_size=12, max_tokens=4, width=30)
    with pytest.raises(ConfigError, match="context_dropout"):
        RLTokenModelConfig(hidden_size=12, max_tokens=4, context_dropout=1.5)
    with pytest.raises(ConfigError, match="rollout_episodes"):
        RLTokenConfig(demos=None)


def test_pretraining_command_end_to_end(tmp_path):
    from test_vla_mini import small_config, write_demos

    from vla_gym.vla.mini import MiniVLA
    from vla_gym_trainers.rl_token import train_rl_token

    MiniVLA(small_config()).save_half(tmp_path / "vla")
    write_demos(tmp_path)
    config = RLTokenConfig(
        vla=str(tmp_path / "vla"),
        demos=str(tmp_path),
        output=str(tmp_path / "run"),
        frame_stride=2,
        width=32,
        steps=20,
    )
    result = train_rl_token(config)
    assert result["train_states"] + result["held_out_states"] == 60
    assert load_rl_token(tmp_path / "run" / "model").hidden_size == 32


def test_shipped_encoder_fits_the_shipped_vla():
    from vla_gym.vla import load

    encoder = load_rl_token("mini")
    assert encoder.hidden_size == load("mini").hidden_size and encoder.dim == 256
