"""The RL token: a VLA's hidden states compressed into one vector for a small actor and critic.

After "RL Token" (arXiv 2604.23073): an encoder appends a learnable readout token to the hidden
states; a decoder must rebuild the states from the readout alone, step by step.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path

from vla_gym.errors import ConfigError, RLTokenWarning
from vla_gym.rl_token.model import RLTokenDecoder, RLTokenEncoder, RLTokenModelConfig
from vla_gym.vla import check_device
from vla_gym.vla.base import FrozenVLA
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.files import WEIGHTS_ROOT, last_written, resolve_weights

__all__ = [
    "RLTokenModelConfig",
    "RLTokenDecoder",
    "RLTokenEncoder",
    "choose_rl_token",
    "load_rl_token",
    "stored_decoder",
]


def load_rl_token(name_or_path: str | Path, device: str = "cpu") -> RLTokenEncoder:
    """Return a frozen RL-token encoder; the same one for the same arguments and files.

    Args:
        name_or_path: Name of the VLA it belongs to (``"mini"`` stands for the shipped folder
            ``weights/mini-rl-token``), or a folder with config.json and model.safetensors.
        device: Torch device.

    Raises:
        ConfigError: If there is no such device.
        WeightsError: If the checkpoint is missing, corrupt or of another architecture.
    """
    check_device(device)
    folder = resolve_weights(name_or_path, suffix="-rl-token")
    return _load(folder, device, last_written(folder))


def choose_rl_token(
    rl_token: str | Path | RLTokenEncoder | None, vla: FrozenVLA, device: str = "cpu"
) -> RLTokenEncoder | None:
    """Return the encoder that an environment with ``vla`` inside should use.

    Args:
        rl_token: ``"auto"`` for the one that ships with the VLA (the mean hidden state, with a
            warning, if none does); a name or a folder; the encoder itself; None or ``"mean"`` for
            the mean hidden state.
        vla: The VLA.
        device: Torch device.

    Raises:
        ConfigError: If it is none of these, or there is no such device.
        WeightsError: If a checkpoint that was named is missing or unusable.
    """
    if rl_token is None or isinstance(rl_token, RLTokenEncoder):
        return rl_token
    if not isinstance(rl_token, str | Path):
        raise ConfigError(
            f"rl_token must be 'auto', 'mean', a folder or an encoder; got {rl_token!r:.80}."
        )
    if rl_token == "mean":
        return None
    if rl_token == "auto":
        rl_token = getattr(vla, "shipped_as", None)
        if rl_token is None or not (WEIGHTS_ROOT / f"{rl_token}-rl-token").is_dir():
            warnings.warn(
                f"No RL token belongs to the VLA {vla.name!r}: the mean of its hidden states takes "
                "its place. Pretrain one with 'vla-gym-train rl-token --vla ...' and pass its "
                "folder as rl_token=, or pass rl_token='mean' to say that the mean is meant.",
                RLTokenWarning,
                stacklevel=2,
            )
            return None
    return load_rl_token(rl_token, device)


def stored_decoder(encoder: RLTokenEncoder) -> RLTokenDecoder | None:
    """Return the decoder in the folder that an encoder was loaded from; None if there is none.

    Raises:
        WeightsError: If there is one that cannot be read.
    """
    file = None if encoder.source is None else encoder.source / "model.safetensors"
    if file is None or not file.is_file():
        return None
    if not any(name.startswith(RLTokenDecoder.prefix) for name in Checkpoint(file).shapes):
        return None
    return RLTokenDecoder.from_pretrained(file.parent)


@cache
def _load(folder: Path, device: str, written: object) -> RLTokenEncoder:  # noqa: ARG001
    return RLTokenEncoder.from_pretrained(folder).to(device)
