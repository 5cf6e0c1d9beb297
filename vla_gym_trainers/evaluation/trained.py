"""A trained policy of ``vla-gym-train`` in an evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.rollout.policies import BATCH_SIZE, Info, Observations, in_fixed_batches
from vla_gym.rollout.vla_policy import check_chunk_len, vla_identity
from vla_gym.vla.base import CAMERAS
from vla_gym.wrappers.vla_features import look
from vla_gym_trainers.evaluation.trained_on import trained_on

if TYPE_CHECKING:
    from vla_gym.rl_token import RLTokenEncoder
    from vla_gym.vla import FrozenVLA


class ActorPolicy:
    """A policy over the RL token on top of a frozen VLA, as TD3 trains it; deterministic.

    Attributes:
        squared_distances: By task, the mean squared difference to the VLA's chunk, one number for
            each chunk that was chosen so far.
    """

    expert = False

    def __init__(
        self,
        model: Any,
        vla: FrozenVLA | None,
        rl_token: RLTokenEncoder | None,
        chunk_len: int,
        *,
        batch_size: int = BATCH_SIZE,
        name: str = "policy",
    ) -> None:
        """Put a policy together.

        Args:
            model: Has SB3's ``predict``; None plays the VLA's own chunks.
            vla: The VLA; None where the observations hold its features already.
            rl_token: The RL token's encoder; None for the mean hidden state.
            chunk_len: Rows of the chunks.
            batch_size: Rows of a forward pass.
            name: What tables call it.
        """
        self._model, self._vla, self._encoder = model, vla, rl_token
        self._batch_size, self.chunk_len, self.name = batch_size, chunk_len, name
        self.image_size = 1 if vla is None else vla.image_size
        self.cameras: tuple[str, ...] = tuple(getattr(vla, "cameras", CAMERAS))
        self.identity: dict[str, Any] = {"kind": "trained"}
        self.squared_distances: dict[int, list[float]] = {}

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Return the policy's chunks."""
        both = in_fixed_batches(self._forward, observations, infos, self._batch_size)
        actions, references = np.split(both, 2, axis=1)
        squares = np.square(actions - references).mean(axis=(1, 2)).tolist()
        for info, square in zip(infos, squares, strict=True):
            self.squared_distances.setdefault(info["task_id"], []).append(square)
        return actions

    def _forward(self, observations: dict[str, np.ndarray], instruction: str) -> np.ndarray:
        """Return (B, 2 C, action size): the policy's chunks and below them the VLA's."""
        features = observations
        if self._vla is not None:
            images = {camera: observations[camera] for camera in self.cameras}
            proprio = observations["proprio"]
            told = [instruction] * len(proprio)
            token, chunk = look(self._vla, self._encoder, self.chunk_len, images, told, proprio)
            features = {
                "rl_token": token,
                "vla_action": chunk,
                "proprio": proprio,
                "task_id": observations["task_id"],
            }
        reference = np.asarray(features["vla_action"], np.float32)
        if self._model is None:
            return np.concatenate([reference, reference], axis=1)
        action, _ = self._model.predict(features, deterministic=True)
        return np.concatenate([np.clip(action, -1.0, 1.0), reference], axis=1)


def load_trained(
    path: Path,
    vla: str | None = None,
    batch_size: int = BATCH_SIZE,
    *,
    rl_token: str | None = None,
    device: str = "cpu",
) -> ActorPolicy:
    """Load a policy of ``vla-gym-train td3``, its VLA and the RL token's encoder.

    Args:
        path: The .zip, or the run directory that holds ``policy.zip`` and ``config.json``.
        vla: The VLA, as ``vla_gym.vla.load`` takes it; default: the one that the run's
            configuration names, else ``"mini"``.
        batch_size: Rows of a forward pass.
        rl_token: Folder of its encoder, ``"auto"`` or ``"mean"``; default: as in the run.
        device: Torch device of VLA and encoder.

    Raises:
        WeightsError: If a file is missing or damaged.
        ConfigError: If policy and VLA do not fit each other.
    """
    from vla_gym.rl_token import choose_rl_token
    from vla_gym.vla import load
    from vla_gym_trainers.evaluation.evaluate import load_policy

    model = load_policy(path)
    known = trained_on(path)
    given, vla = vla is not None, vla or known.vla
    rl_token = rl_token or known.rl_token
    # What a run's configuration names is a checkpoint, never a class to import.
    loaded = load(vla, device=device, allow_class=given)
    encoder = choose_rl_token(rl_token, loaded, device)
    chunk_len = check_chunk_len(int(model.action_space.shape[0]), loaded)
    name = path.stem if path.is_file() else path.name
    policy = ActorPolicy(model, loaded, encoder, chunk_len, batch_size=batch_size, name=name)
    wanted = model.observation_space["rl_token"].shape
    dim = loaded.hidden_size if encoder is None else encoder.dim
    if wanted != (dim,):
        raise ConfigError(
            f"{path} was trained on RL tokens of shape {wanted}, here they have ({dim},): name "
            f"what it was trained on with --vla (now {vla}) and --rl-token (now {rl_token})."
        )
    token = {"name": "mean"}
    if encoder is not None:
        token = vla_identity(loaded.name if rl_token == "auto" else rl_token, "-rl-token")
    files = [path / name for name in ("rl_token_actor.safetensors", "policy.zip")]
    content = next((file for file in files if file.is_file()), path).read_bytes()
    policy.identity |= {
        "sha256": hashlib.sha256(content).hexdigest(),
        "guarded_tasks": list(model.guarded_tasks),
        "vla": vla_identity(vla),
        "rl_token": token,
    }
    return policy
