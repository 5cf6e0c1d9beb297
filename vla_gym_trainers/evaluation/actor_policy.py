"""A policy over the RL token, as a player of episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.rollout.policies import BATCH_SIZE, Info, Observations, in_episodes
from vla_gym.vla.base import CAMERAS
from vla_gym.vla.stateful import VLAMemory
from vla_gym.wrappers.vla_features import look
from vla_gym_trainers.rollout.memory import EpisodeMemory
from vla_gym_trainers.world_model.protocol import WORLD_MEMORY, WorldModel

if TYPE_CHECKING:
    from vla_gym.rl_token import RLTokenEncoder
    from vla_gym.vla import FrozenVLA


class ActorPolicy:
    """A policy over the RL token on top of a frozen VLA, as TD3 and PPO train it; deterministic.

    The state of a stateful VLA is kept by environment: it plays in one rollout at a time.
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
        world_model: WorldModel | None = None,
    ) -> None:
        """Put a policy together.

        The model has SB3's ``predict``; None plays the VLA's own chunks. The VLA is None where the
        observations hold its features already, the encoder for the mean hidden state. The policy
        sees the memory of the world model, if there is one.
        """
        self._world_model = world_model
        self._model, self.vla, self._encoder = model, vla, rl_token
        self._vla_memory = None if vla is None else VLAMemory(vla)
        self._batch_size, self.chunk_len, self.name = batch_size, chunk_len, name
        self.image_size = 1 if vla is None else vla.image_size
        self._views = CAMERAS if vla is None else vla.cameras
        self.cameras = self._views
        if world_model is not None:  # which may look where the VLA does not
            self.cameras = tuple(dict.fromkeys((*self._views, *world_model.cameras, "wrist")))
        self.identity: dict[str, Any] = {"kind": "trained"}
        self._memory = EpisodeMemory(getattr(model, "carried", {}))

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Return the policy's chunks."""
        return self._memory.act(self._forward, observations, infos, self._batch_size)

    def wrap_envs(self, envs: Any) -> Any:
        """Return environments that observe the world model's memory, if the policy sees one."""
        if self._world_model is None:
            return envs
        from vla_gym_trainers.world_model.wrapper import WorldModelObservation

        return WorldModelObservation(envs, self._world_model)

    def _forward(
        self, observations: dict[str, np.ndarray], infos: list[Info]
    ) -> tuple[np.ndarray, np.ndarray]:
        features = observations
        if self._vla_memory is not None:
            images = {camera: observations[camera] for camera in self._views}
            proprio = observations["proprio"]
            vla = in_episodes(self._vla_memory, infos)
            told = [info["instruction"] for info in infos]
            token, chunk = look(vla, self._encoder, self.chunk_len, images, told, proprio)
            features = {
                "rl_token": token,
                "vla_action": chunk,
                "proprio": proprio,
                "task_id": observations["task_id"],
            }
            if self._world_model is not None:
                features[WORLD_MEMORY] = observations[WORLD_MEMORY]
        none = np.zeros((len(infos), 0), np.float32)
        if self._model is None:
            return np.asarray(features["vla_action"], np.float32), none
        state = tuple(observations[name] for name in self._memory.shapes) or None
        action, state = self._model.predict(features, state, deterministic=True)
        chunks = np.asarray(np.clip(action, -1.0, 1.0))
        return chunks, none if state is None else state[0]
