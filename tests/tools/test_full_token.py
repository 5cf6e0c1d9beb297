"""tools/make_full_token.py: all hidden states in the place of the RL token."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from make_full_token import full_token

from vla_gym.errors import ConfigError
from vla_gym.rl_token import RLTokenEncoder, RLTokenModelConfig, load_rl_token


def test_it_keeps_every_number_of_the_hidden_states(tmp_path: Path) -> None:
    own = load_rl_token("mini-few")
    full_token(own).save_pretrained(tmp_path / "full")
    full = load_rl_token(tmp_path / "full")
    hidden = torch.randn(3, own.config.max_tokens, own.hidden_size)
    flat = own.standardise(hidden).flatten(1)
    expected = torch.nn.functional.layer_norm(flat, (flat.shape[1],))
    # The scale is stored in float16.
    torch.testing.assert_close(full.encode(hidden), expected, atol=2e-2, rtol=0)
    assert full.dim == 8 * 192


def test_states_of_a_large_vla_are_refused_before_memory_is_taken() -> None:
    sizes = RLTokenModelConfig(hidden_size=4096, max_tokens=56, dim=8, width=8, num_heads=1)
    with pytest.raises(ConfigError, match="229376 numbers, at most 8192"):
        full_token(RLTokenEncoder(sizes))
