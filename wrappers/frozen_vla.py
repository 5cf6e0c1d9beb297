"""A frozen VLA inside the environment: its RL token and its own action as the observation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from vla_gym.wrappers.vla_features import VLAFeatures

if TYPE_CHECKING:
    from vla_gym.rl_token import RLTokenEncoder
    from vla_gym.vla.base import FrozenVLA


class FrozenVLAObservation(gym.Wrapper[dict[str, Any], np.ndarray, dict[str, Any], np.ndarray]):
    """Replace camera images by what a frozen VLA makes of them.

    Observation, a Dict of:
        ``rl_token``: (D,) float32, the RL token (arXiv 2604.23073): the VLA's last hidden states
        compressed by a pretrained encoder;
        ``vla_action``: (C, 7) float32 in [-1, 1], the chunk that the VLA itself would execute;
        ``proprio``: (8,) float32, ``task_id`` and whatever else the environment observes (such as
        the histories of :class:`vla_gym.wrappers.History`), as they are;
        with ``keep_images``, ``agentview`` and ``wrist`` too.

    Playing ``vla_action`` back as the action is the VLA's own policy, through exactly the path
    that a learned policy takes. :mod:`vla_gym.wrappers.vector` has the same for many environments.
    """

    def __init__(
        self,
        env: gym.Env[dict[str, Any], np.ndarray],
        vla: str | FrozenVLA = "mini",
        rl_token: str | RLTokenEncoder | None = "auto",
        keep_images: bool = False,
    ) -> None:
        """Wrap a chunked LIBERO environment that observes both cameras.

        Args:
            env: Environment with observations ``agentview``, ``wrist``, ``proprio``, ``task_id``
                and actions (C, 7).
            vla: Name or directory of a VLA, or the model itself.
            rl_token: ``"auto"`` for the encoder that ships with the VLA (the mean hidden state if
                none does), a name or a directory, the encoder itself; None or ``"mean"``.
            keep_images: Whether the camera images stay in the observation.

        Raises:
            ConfigError: If the environment does not fit the VLA, or the encoder does not.
        """
        super().__init__(env)
        self._features = VLAFeatures(
            vla, rl_token, env.observation_space, env.action_space, keep_images
        )
        self.vla, self.rl_token = self._features.vla, self._features.rl_token
        self.observation_space = self._features.space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset the environment and let the VLA look at the first frame."""
        obs, info = self.env.reset(seed=seed, options=options)
        return self._convert(obs, info), info

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Execute a chunk and let the VLA look at the last frame."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self._convert(obs, info), float(reward), terminated, truncated, info

    def _convert(self, obs: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
        made = self._features(
            {view: obs[view][None] for view in self._features.views},
            [info["instruction"]],
            obs["proprio"][None],
        )
        kept = {key: obs[key] for key in self._features.kept}
        return {**{key: rows[0] for key, rows in made.items()}, **kept}
