"""A trained policy of ``vla-gym-train`` in an evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.wrappers.vla_features import look
from vla_gym_trainers.evaluation.policies import (
    CAMERAS,
    Info,
    Observations,
    check_chunk_len,
    in_fixed_batches,
    vla_identity,
)
from vla_gym_trainers.evaluation.trained_on import trained_on


class TrainedPolicy:
    """A policy of ``vla-gym-train td3`` on top of a frozen VLA; deterministic."""

    expert = False
    cameras: tuple[str, ...] = CAMERAS

    def __init__(
        self,
        path: Path,
        vla: str | None = None,
        batch_size: int = 8,
        *,
        rl_token: str | None = None,
        device: str = "cpu",
    ) -> None:
        """Load the policy, its VLA and the RL token's encoder.

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

        self._model = load_policy(path)
        known = trained_on(path)
        given, vla = vla is not None, vla or known.vla
        rl_token = rl_token or known.rl_token
        # What a run's configuration names is a checkpoint, never a class to import.
        self._vla = load(vla, device=device, allow_class=given)
        self._encoder = choose_rl_token(rl_token, self._vla, device)
        self._batch_size = batch_size
        self.chunk_len = int(self._model.action_space.shape[0])
        self.image_size = self._vla.image_size
        self.name = path.stem if path.is_file() else path.name
        check_chunk_len(self.chunk_len, self._vla)
        wanted = self._model.observation_space["rl_token"].shape
        dim = self._vla.hidden_size if self._encoder is None else self._encoder.dim
        if wanted != (dim,):
            raise ConfigError(
                f"{path} was trained on RL tokens of shape {wanted}, here they have ({dim},): name "
                f"what it was trained on with --vla (now {vla}) and --rl-token (now {rl_token})."
            )
        content = (path / "policy.zip" if path.is_dir() else path).read_bytes()
        self.identity: dict[str, Any] = {
            "kind": "trained",
            "sha256": hashlib.sha256(content).hexdigest(),
            "guarded_tasks": list(self._model.guarded_tasks),
            "vla": vla_identity(vla),
            "rl_token": {"name": "mean"} if self._encoder is None else self._token(rl_token),
        }

    def _token(self, rl_token: str) -> dict[str, Any]:
        name = self._vla.name if rl_token == "auto" else rl_token
        return vla_identity(name, "-rl-token")

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Return the policy's chunks."""
        return in_fixed_batches(self._forward, observations, infos, self._batch_size)

    def _forward(self, observations: dict[str, np.ndarray], instruction: str) -> np.ndarray:
        images = {camera: observations[camera] for camera in CAMERAS}
        proprio = observations["proprio"]
        token, chunk = look(
            self._vla, self._encoder, self.chunk_len, images, [instruction] * len(proprio), proprio
        )
        features = {
            "rl_token": token,
            "vla_action": chunk,
            "proprio": proprio,
            "task_id": observations["task_id"],
        }
        action, _ = self._model.predict(features, deterministic=True)
        return np.clip(action, -1.0, 1.0)
