"""The RL token: a VLA's hidden states compressed into one vector for a small actor and critic.

After "RL Token" (arXiv 2604.23073): an encoder appends a learnable readout token to the hidden
states; a decoder must rebuild the states from the readout alone, step by step.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from vla_gym.rl_token.losses import explained_variance, reconstruction_loss
from vla_gym.rl_token.model import RLTokenDecoder, RLTokenEncoder, RLTokenModelConfig
from vla_gym.vla.files import resolve_weights

__all__ = [
    "RLTokenModelConfig",
    "RLTokenDecoder",
    "RLTokenEncoder",
    "explained_variance",
    "load_rl_token",
    "reconstruction_loss",
]


def load_rl_token(name_or_path: str | Path, device: str = "cpu") -> RLTokenEncoder:
    """Return a frozen RL-token encoder; the same one for every call with the same arguments.

    Args:
        name_or_path: Name of the VLA it belongs to (``"mini"`` stands for the shipped folder
            ``weights/mini-rl-token``), or a folder with config.json and model.safetensors.
        device: Torch device.

    Raises:
        WeightsError: If the checkpoint is missing, corrupt or of another architecture.
    """
    return _load(resolve_weights(name_or_path, suffix="-rl-token"), device)


@cache
def _load(folder: Path, device: str) -> RLTokenEncoder:
    return RLTokenEncoder.from_pretrained(folder).to(device).eval().requires_grad_(False)
