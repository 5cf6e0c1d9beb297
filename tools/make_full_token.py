"""Write an "RL token" of all hidden states of a VLA side by side, to compare with the real one.

Usage: python tools/make_full_token.py mini-few runs/full-token
       tools/results_suite.sh goal 0 --rl-token runs/full-token

It is an encoder whose linear path is the identity: the states standardised as the VLA's own RL
token does, normalised over the observation like every token. ``--rl-token mean`` is the mean of
the states, ``--no-use-rl-token`` leaves all of them out.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from vla_gym.errors import ConfigError
from vla_gym.rl_token import RLTokenEncoder, load_rl_token

#: The identity is stored as a matrix, and a replay holds every observation twice.
MAX_NUMBERS = 8192


def full_token(own: RLTokenEncoder) -> RLTokenEncoder:
    """Return an encoder whose tokens are (B, M * H) float32, of hidden states (B, M, H).

    Args:
        own: The VLA's own encoder, which knows the sizes and each number's scale.

    Raises:
        ConfigError: If the states hold more than 8,192 numbers.
    """
    size = own.config.max_tokens * own.hidden_size
    if size > MAX_NUMBERS:
        raise ConfigError(
            f"The hidden states of an observation hold {size} numbers, at most {MAX_NUMBERS} can "
            "be a token as they are: compare with --rl-token mean."
        )
    config = replace(own.config, dim=size, encoder_layers=1, linear_path=True, linear_rank=0)
    full = RLTokenEncoder(config)
    full.mean.copy_(own.mean)
    full.std.copy_(own.std)
    assert full.linear is not None
    torch.nn.init.eye_(full.linear.weight)
    torch.nn.init.zeros_(full.out.weight)
    torch.nn.init.zeros_(full.out.bias)
    return full.eval().requires_grad_(False)


def main() -> None:
    """Write the encoder to a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("vla", help="name of a VLA with an RL token, or the token's folder")
    parser.add_argument("folder", type=Path, help="where the encoder is written")
    options = parser.parse_args()
    token = full_token(load_rl_token(options.vla))
    token.save_pretrained(options.folder)
    print(f"{options.folder}: {token.dim} numbers")


if __name__ == "__main__":
    main()
