"""The tokenizer: nearest codes, running averages by hand, gradients, what it learns."""

from __future__ import annotations

import pytest
import torch

from vla_gym.errors import ConfigError
from vla_gym_trainers.world_model.tokenizer import (
    DEAD_BELOW,
    EMA_DECAY,
    FrameTokenizer,
    TokenizerConfig,
    to_pixels,
)

SMALL = TokenizerConfig(frame_size=8, grid_size=2, codebook_size=4, code_size=2, width=4)


def make(config: TokenizerConfig = SMALL) -> FrameTokenizer:
    torch.manual_seed(0)
    return FrameTokenizer(config)


def grid(*vectors: tuple[float, float]) -> torch.Tensor:
    """One frame's vectors (1, 2, 2, 2), row by row."""
    return torch.tensor(vectors).view(1, 2, 2, 2).permute(0, 3, 1, 2)


def test_takes_the_nearest_code():
    tokenizer = make()
    tokenizer.codebook.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [5.0, 5.0]]))
    found = tokenizer.quantise(grid((0.9, 0.2), (0.1, 0.1), (0.2, 0.7), (3.0, 3.0)))
    assert found.tokens.tolist() == [[1, 0, 2, 3]]
    torch.testing.assert_close(found.codes, grid((1.0, 0.0), (0.0, 0.0), (0.0, 1.0), (5.0, 5.0)))
    # Squared distances 0.05, 0.02, 0.13 and 8, each over two numbers.
    assert found.commitment.item() == pytest.approx((0.05 + 0.02 + 0.13 + 8.0) / 8)


def test_gradients_pass_the_codebook_straight_through():
    tokenizer = make()
    tokenizer.codebook.normal_()
    vectors = torch.randn(3, 2, 2, 2, requires_grad=True)
    weight = torch.randn(3, 2, 2, 2)
    (tokenizer.quantise(vectors).codes * weight).sum().backward()
    torch.testing.assert_close(vectors.grad, weight)


def test_the_codebook_follows_by_running_averages():
    tokenizer, generator = make(), torch.Generator().manual_seed(0)
    tokenizer.counts.fill_(2.0)
    tokenizer.sums.copy_(torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [8.0, 8.0]]))
    tokenizer.codebook.copy_(tokenizer.sums / 2.0)
    vectors = grid((1.2, 0.0), (0.8, 0.4), (0.1, 0.1), (0.0, 1.0))
    tokens = tokenizer.quantise(vectors).tokens
    assert tokens.tolist() == [[1, 1, 0, 2]]
    tokenizer.follow(vectors, tokens, generator)
    d = EMA_DECAY
    torch.testing.assert_close(
        tokenizer.counts, torch.tensor([d * 2 + 1 - d, d * 2 + 2 * (1 - d), d * 2 + 1 - d, d * 2])
    )
    second = torch.tensor([d * 2 + (1 - d) * 2.0, (1 - d) * 0.4]) / (d * 2 + 2 * (1 - d))
    torch.testing.assert_close(tokenizer.codebook[1], second)
    torch.testing.assert_close(tokenizer.codebook[3], torch.tensor([4.0, 4.0]))


def test_a_dead_code_becomes_a_vector_of_the_batch():
    tokenizer, generator = make(), torch.Generator().manual_seed(0)
    tokenizer.counts.copy_(torch.tensor([1.0, 1.0, 1.0, DEAD_BELOW]))
    tokenizer.sums.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    tokenizer.codebook.copy_(tokenizer.sums / tokenizer.counts[:, None])
    vectors = grid((0.1, 0.0), (0.9, 0.0), (0.0, 0.2), (0.0, 0.8))
    tokenizer.follow(vectors, tokenizer.quantise(vectors).tokens, generator)
    rows = vectors.permute(0, 2, 3, 1).flatten(0, 2)
    assert (rows == tokenizer.codebook[3]).all(dim=1).any()
    assert tokenizer.counts[3] == 1.0


def test_probabilities_decode_to_the_expected_codes():
    tokenizer = make().eval()
    tokenizer.codebook.normal_()
    tokens = torch.tensor([[0, 1, 2, 3]])
    sure = torch.nn.functional.one_hot(tokens, 4).float()
    torch.testing.assert_close(tokenizer._grid(sure), tokenizer._grid(tokens))
    half = torch.full((1, 4, 4), 0.25)
    expected = tokenizer.codebook.mean(0).view(1, 2, 1, 1).expand(1, 2, 2, 2)
    torch.testing.assert_close(tokenizer._grid(half), expected)
    frames = tokenizer.decode(half)
    assert frames.shape == (1, 8, 8, 3) and frames.dtype == torch.uint8


def test_learns_frames_of_few_kinds():
    """Three colours in four quarters: 81 frames, which four codes a place can tell apart."""
    tokenizer, generator = make(), torch.Generator().manual_seed(0)
    colours = torch.tensor([[220, 40, 40], [40, 220, 40], [40, 40, 220]], dtype=torch.uint8)
    kinds = torch.randint(3, (64, 2, 2), generator=generator)
    frames = colours[kinds].repeat_interleave(4, 1).repeat_interleave(4, 2)
    optimizer = torch.optim.Adam(tokenizer.parameters(), lr=1e-2)
    for _ in range(400):
        losses = tokenizer.loss(frames, generator, 0.25)
        optimizer.zero_grad()
        losses["loss"].backward()
        optimizer.step()
    tokenizer.eval()
    shown = tokenizer.decode(tokenizer.tokens(frames))
    error = (to_pixels(shown) - to_pixels(frames)).square().mean().item()
    blank = to_pixels(frames).var().item()
    assert error < 0.05 * blank
    assert losses["codes"].item() >= 0.75  # three of four


def test_refuses_sizes_that_do_not_fit():
    with pytest.raises(ConfigError, match="grid_size times 2, 4, 8"):
        TokenizerConfig(frame_size=64, grid_size=12)
    with pytest.raises(ConfigError, match="codebook_size: expected `int` >= 2, got 1"):
        TokenizerConfig(codebook_size=1)
    assert TokenizerConfig().num_tokens == 64
