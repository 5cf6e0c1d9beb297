"""A frozen VLA inside the environment: its RL token and its own action as the observation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.errors import ConfigError

if TYPE_CHECKING:
    from vla_gym.rl_token import RLTokenEncoder
    from vla_gym.vla.base import FrozenVLA


class FrozenVLAObservation(gym.Wrapper[dict[str, Any], np.ndarray, dict[str, Any], np.ndarray]):
    """Replace camera images by what a frozen VLA makes of them.

    Observation, a Dict of:
        ``rl_token``: (D,) float32, the RL token (arXiv 2604.23073): the VLA's last hidden states
        compressed by a pretrained encoder;
        ``vla_action``: (C, 7) float32 in [-1, 1], the chunk that the VLA itself would execute;
        ``proprio``: (8,) float32 and ``task_id``, as in ``Libero-*``.

    Playing ``vla_action`` back as the action is the VLA's own policy, through exactly the path
    that a learned policy takes.
    """

    def __init__(
        self,
        env: gym.Env[dict[str, Any], np.ndarray],
        vla: str | FrozenVLA = "mini",
        rl_token: str | RLTokenEncoder | None = "auto",
    ) -> None:
        """Wrap a chunked LIBERO environment that observes both cameras.

        Args:
            env: Environment with observations ``agentview``, ``wrist``, ``proprio``, ``task_id``
                and actions (C, 7).
            vla: Name or directory of a VLA, or the model itself.
            rl_token: ``"auto"`` for the encoder that belongs to the VLA, a name or a directory,
                the encoder itself, or None for the mean hidden state.

        Raises:
            ConfigError: If the environment does not fit the VLA, or the encoder does not.
        """
        from vla_gym.rl_token import load_rl_token
        from vla_gym.vla import load

        super().__init__(env)
        self.vla = load(vla) if isinstance(vla, str) else vla
        if rl_token == "auto":
            rl_token = self.vla.name
        self.rl_token = load_rl_token(rl_token) if isinstance(rl_token, str) else rl_token
        self._check_fit()
        action_space = env.action_space
        inner = env.observation_space
        assert isinstance(action_space, spaces.Box) and isinstance(inner, spaces.Dict)
        dim = self.vla.hidden_size if self.rl_token is None else self.rl_token.dim
        self.observation_space = spaces.Dict(
            {
                "rl_token": spaces.Box(-np.inf, np.inf, (dim,), np.float32),
                "vla_action": spaces.Box(-1.0, 1.0, action_space.shape, np.float32),
                "proprio": inner["proprio"],
                "task_id": inner["task_id"],
            }
        )

    def _check_fit(self) -> None:
        inner = self.env.observation_space
        if not isinstance(inner, spaces.Dict) or not {"agentview", "wrist"} <= set(inner.keys()):
            raise ConfigError(
                f"Expected observations with 'agentview' and 'wrist', got {inner}: make the "
                "environment with cameras=('agentview', 'wrist')."
            )
        shape = self.env.action_space.shape
        if shape is None or len(shape) != 2 or shape[0] > self.vla.horizon:
            raise ConfigError(
                f"Expected actions of shape (C, 7) with C <= {self.vla.horizon} (the VLA's "
                f"horizon), got {shape}: set chunk_len, or wrap with ActionChunk."
            )
        if self.rl_token is not None and self.rl_token.hidden_size != self.vla.hidden_size:
            raise ConfigError(
                f"The RL-token encoder expects hidden states of size {self.rl_token.hidden_size}, "
                f"the VLA {self.vla.name!r} gives {self.vla.hidden_size}: pretrain one for it with "
                "'vla-gym-train rl-token'."
            )

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
        images = {key: obs[key][None] for key in ("agentview", "wrist")}
        output = self.vla.infer(images, [info["instruction"]], obs["proprio"][None])
        if self.rl_token is None:
            token = output.hidden.mean(dim=1)
        else:
            token = self.rl_token.encode(output.hidden)
        shape = self.action_space.shape
        assert shape is not None
        action = output.actions[0, : shape[0]].cpu().numpy().astype(np.float32)
        return {
            "rl_token": token[0].detach().cpu().numpy().astype(np.float32),
            "vla_action": np.clip(action, -1.0, 1.0),
            "proprio": obs["proprio"],
            "task_id": obs["task_id"],
        }
