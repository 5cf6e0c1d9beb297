"""Chunks that are executed piece by piece, so that what was seen inside them can be learned from.

::

    chunk of C = 8, stride 2:   | a0 a1 | a2 a3 | a4 a5 | a6 a7 |
    observations:               o0      o2      o4      o6      o8   (o8: of the next chunk)

The action is a whole chunk as ever, and nothing that happens is another: only the frames at o2, o4
and o6 are rendered and shown to the VLA as well. They come in ``info["pieces"]``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvStepReturn

from vla_gym.errors import ConfigError
from vla_gym_trainers.runs.sb3_vec_env import _OF_THE_END, SB3VecEnv, _of_one, _own


class Piece(NamedTuple):
    """One executed piece of a chunk.

    Attributes:
        obs: Observation at its end; of the last piece of an episode the terminal one.
        reward: Discounted sum of the rewards inside it.
        discount: gamma ** executed_steps of it.
    """

    obs: dict[str, np.ndarray]
    reward: float
    discount: float


def make_stride_vec_env(
    env_id: str, num_envs: int, stride: int, *, chunk_len: int | None = None, **kwargs: Any
) -> StrideVecEnv:
    """Make ``LiberoVLA-*`` environments whose chunks are executed in pieces.

    Args:
        env_id: ``"LiberoVLA-<suite>-v0"``.
        num_envs: Number of environments.
        stride: Control steps of a piece; it divides the chunk length.
        chunk_len: Control steps of a chunk; default: the VLA's horizon.
        **kwargs: See :func:`vla_gym.envs.registration.make_libero_vla_vec`; ``gamma`` is needed.

    Raises:
        ConfigError: If the stride does not divide the chunk length, or gamma is missing.
    """
    import vla_gym  # noqa: F401  (registers the ids)

    if kwargs.get("gamma") is None:
        raise ConfigError("Pieces of chunks are discounted: give gamma.")
    kwargs.setdefault("autoreset_mode", AutoresetMode.SAME_STEP)
    vector_env = gym.make_vec(env_id, num_envs, chunk_len=chunk_len, execute=stride, **kwargs)
    try:
        return StrideVecEnv(vector_env)
    except BaseException:
        vector_env.close()
        raise


class StrideVecEnv(SB3VecEnv):
    """SB3's interface to a vector environment that executes pieces of the observed chunks.

    Observations, rewards, ends and infos are those of :class:`SB3VecEnv` over environments that
    execute the chunk at once; ``info["pieces"]`` is added, a list of :class:`Piece`, and
    ``info["stride"]``.
    """

    def __init__(self, vector_env: VectorEnv[Any, Any, Any]) -> None:
        """Adapt.

        Args:
            vector_env: With ``send`` and ``recv``, SAME_STEP, actions (stride, 7) and observations
                with ``vla_action`` (C, 7). Closed with the adapter.

        Raises:
            ConfigError: If it does not fit.
        """
        super().__init__(vector_env)
        space = vector_env.single_observation_space
        if not isinstance(space, spaces.Dict) or not hasattr(vector_env, "send"):
            raise ConfigError("Expected LiberoVLA environments over LiberoVectorEnv.")
        shape, piece = space["vla_action"].shape, vector_env.single_action_space.shape
        assert shape is not None and piece is not None
        self.stride, chunk_len = int(piece[0]), int(shape[0])
        if chunk_len % self.stride:
            raise ConfigError(
                f"The stride must divide the chunk length {chunk_len}, got {self.stride}."
            )
        self.num_pieces = chunk_len // self.stride
        self.action_space = spaces.Box(-1.0, 1.0, shape, np.float32)

    def step_async(self, actions: np.ndarray) -> None:
        """Keep the chunks; :meth:`step_wait` executes them."""
        self._actions = np.asarray(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """Execute the chunks, each up to its episode's end; see the class."""
        vector_env: Any = self.vector_env
        going = np.arange(self.num_envs)
        obs: dict[str, np.ndarray] = {}
        rows: list[dict[str, Any]] = [{} for _ in going]
        pieces: list[list[Piece]] = [[] for _ in going]
        dones = np.zeros(self.num_envs, bool)
        for number in range(self.num_pieces):
            part = slice(number * self.stride, (number + 1) * self.stride)
            vector_env.send(self._actions[going, part], going)
            new, rewards, terminations, truncations, infos = vector_env.recv()
            ids = np.asarray(infos["env_id"])
            if not obs:
                obs = {key: np.array(value) for key, value in new.items()}
            for key, value in new.items():
                obs[key][ids] = value
            for row, i in enumerate(ids.tolist()):
                ended = bool(terminations[row] or truncations[row])
                info = self._info(infos, row, i, ended)
                truncated = bool(truncations[row] and not terminations[row])
                executed = rows[i].get("executed_steps", 0) + info.get("executed_steps", 0)
                rows[i] = {**info, "TimeLimit.truncated": truncated, "executed_steps": executed}
                after = info.get("terminal_observation") or {k: v[row] for k, v in new.items()}
                pieces[i].append(Piece(_own(after), float(rewards[row]), _discount(info)))
                dones[i] = ended
            going = ids[~dones[ids]]
            if not len(going):
                break
        totals = np.zeros(self.num_envs)
        for i in range(self.num_envs):
            totals[i] = self._join(rows[i], pieces[i])
        self._count(totals, dones, rows)
        return obs, totals.astype(np.float32), dones, rows

    def _info(self, infos: dict[str, Any], row: int, i: int, ended: bool) -> dict[str, Any]:
        """Return the infos of one environment after a piece; rows differ from environments."""
        info = _of_one(infos, row, skip=_OF_THE_END)
        if ended:
            self.reset_infos[i] = info
            both = _of_one(infos, row)
            info = both.get("final_info", {})
            info["terminal_observation"] = _own(infos["final_obs"][row])
            if "episode_stats" in both:
                info["episode_stats"] = both["episode_stats"]
        return info

    def _join(self, info: dict[str, Any], pieces: list[Piece]) -> float:
        """Give a chunk's infos what its pieces add up to; return the reward."""
        reward, discount = 0.0, 1.0
        for piece in pieces:
            reward += discount * piece.reward
            discount *= piece.discount
        info["pieces"], info["stride"], info["discount"] = pieces, self.stride, discount
        return reward

    def _count(self, rewards: np.ndarray, dones: np.ndarray, rows: list[dict[str, Any]]) -> None:
        self._returns += rewards
        self._lengths += 1
        for i in np.flatnonzero(dones).tolist():
            if not rows[i].get("worker_restarted", False):
                # The environment adds up the rewards of pieces, not of chunks.
                stats = {**rows[i].get("episode_stats", {}), "return": float(self._returns[i])}
                rows[i] |= {"episode_stats": stats, "episode": self._episode(i, stats)}
            self._lengths[i], self._returns[i] = 0, 0.0


def _discount(info: dict[str, Any]) -> float:
    if "discount" not in info:
        raise ConfigError("Pieces of chunks are discounted: make the environments with gamma.")
    return float(info["discount"])
