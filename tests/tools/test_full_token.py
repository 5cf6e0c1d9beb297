"""tools/make_full_token.py: all hidden states in the place of the RL token."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from vla_gym.rl_token import load_rl_token

TOOL = Path(__file__).parents[2] / "tools" / "make_full_token.py"


def test_it_keeps_every_number_of_the_hidden_states(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_full_token", TOOL)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    own = load_rl_token("mini-few")
    tool.full_token(own).save_pretrained(tmp_path / "full")
    full = load_rl_token(tmp_path / "full")
    hidden = torch.randn(3, own.config.max_tokens, own.hidden_size)
    flat = own.standardise(hidden).flatten(1)
    expected = torch.nn.functional.layer_norm(flat, (flat.shape[1],))
    # The scale is stored in float16.
    torch.testing.assert_close(full.encode(hidden), expected, atol=2e-2, rtol=0)
    assert full.dim == 8 * 192
