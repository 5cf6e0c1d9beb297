"""A trained policy of ``vla-gym-train`` in an evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.policies import (
    CAMERAS,
    Info,
    Observations,
    check_chunk_len,
    in_fixed_batches,
    vla_identity,
)


class TrainedPolicy:
    """A policy of ``vla-gym-train td3`` on top of a frozen VLA; deterministic."""

    expert = False
    cameras: tuple[str, ...] = CAMERAS

    def __init__(self, path: Path, vla: str | None = None, batch_size: int = 8) -> None:
        """Load the policy, its VLA and the RL token's encoder.

        Args:
            path: The .zip, or the run directory that holds ``policy.zip`` and ``config.json``.
            vla: Name or directory of the VLA; default: the one that the run directory's
                configuration names, else ``"mini"``.
            batch_size: Rows of a forward pass.

        Raises:
            WeightsError: If a file is missing or damaged.
            ConfigError: If policy and VLA do not fit each other.
        """
        from vla_gym.rl_token import load_rl_token
        from vla_gym.vla import load
        from vla_gym_trainers.evaluate import load_policy
        from vla_gym_trainers.per_task import policy_files

        self._model = load_policy(path)
        given, vla = vla is not None, vla or _trained_vla(path)
        # What a run's configuration names is a checkpoint, never a class to import.
        self._vla = load(vla, allow_class=given)
        self._encoder = load_rl_token(self._vla.name)
        self._batch_size = batch_size
        self.chunk_len = int(self._model.action_space.shape[0])
        self.image_size = self._vla.image_size
        self.name = path.stem if path.is_file() else path.name
        check_chunk_len(self.chunk_len, self._vla)
        wanted = self._model.observation_space["rl_token"].shape
        if wanted != (self._encoder.dim,):
            raise ConfigError(
                f"{path} was trained on RL tokens of shape {wanted}, those of the VLA {vla!r} have "
                f"({self._encoder.dim},): name the VLA it was trained on with --vla."
            )
        content = b"".join(file.read_bytes() for file in policy_files(path))
        self.identity: dict[str, Any] = {
            "kind": "trained",
            "sha256": hashlib.sha256(content).hexdigest(),
            "guarded_tasks": list(self._model.guarded_tasks),
            "vla": vla_identity(vla),
            "rl_token": vla_identity(self._vla.name, "-rl-token"),
        }

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Return the policy's chunks."""
        return in_fixed_batches(self._forward, observations, infos, self._batch_size)

    def _forward(self, observations: dict[str, np.ndarray], instruction: str) -> np.ndarray:
        images = {camera: observations[camera] for camera in CAMERAS}
        proprio = observations["proprio"]
        out = self._vla.infer(images, [instruction] * len(proprio), proprio)
        device = next(self._encoder.parameters()).device
        chunk = out.actions[:, : self.chunk_len].cpu().numpy().astype(np.float32)
        features = {
            "rl_token": self._encoder.encode(out.hidden.to(device)).detach().cpu().numpy(),
            "vla_action": np.clip(chunk, -1.0, 1.0),
            "proprio": proprio,
            "task_id": observations["task_id"],
        }
        action, _ = self._model.predict(features, deterministic=True)
        return np.clip(action, -1.0, 1.0)


def _trained_vla(path: Path) -> str:
    config = path / "config.json"
    if path.is_dir() and config.is_file():
        return str(json.loads(config.read_text(encoding="utf-8")).get("vla", "mini"))
    return "mini"
