"""A Gymnasium vector environment whose steps are chunks, for some of its environments at a time.

With a stride, chunks are executed piece by piece, so that what is seen inside can be learned from::

    chunk of C = 8, stride 2:   | a0 a1 | a2 a3 | a4 a5 | a6 a7 |
    observations:               o0      o2      o4      o6      o8   (o8: of the next chunk)

The action is a whole chunk as ever, and nothing that happens is another: only the frames at o2, o4
and o6 are rendered and shown to the VLA as well. They come in ``info["pieces"]``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from vla_gym.errors import ConfigError
from vla_gym_trainers.rollout.reward_terms import add_terms

Observation = dict[str, np.ndarray]


class Piece(NamedTuple):
    """One executed piece of a chunk.

    Attributes:
        obs: Observation at its end; of the last piece of an episode the terminal one.
        reward: Discounted sum of the rewards inside it.
        discount: gamma ** executed_steps of it.
    """

    obs: Observation
    reward: float
    discount: float


@dataclass
class ChunkStep:
    """What one chunk of each of n environments led to.

    Attributes:
        obs: To act on next: of the next episode where one has ended.
        next_obs: After the chunk, of the same episode.
        rewards: (n,) float32 discounted sums inside the chunk.
        dones: (n,) bool: terminated or truncated.
        infos: n dicts: what the step gave, at the end of an episode also ``episode`` (``r`` return,
            ``l`` chunks, ``t`` seconds) and ``terminal_observation``; always
            ``TimeLimit.truncated``; with a stride ``pieces`` and ``stride``, and ``reward_terms``,
            if there are any, added up over pieces.
    """

    obs: Any
    next_obs: Any
    rewards: np.ndarray
    dones: np.ndarray
    infos: list[dict[str, Any]]


class ChunkEnvs:
    """A vector environment whose steps are chunks.

    Attributes:
        envs: The vector environment.
        action_space: Of one environment: a whole chunk.
        stride: Control steps of a piece; None if chunks are executed at once.
        reset_infos: Infos of the running episodes' beginnings.
        lengths: (num_envs,) chunks of the running episodes.
        returns: (num_envs,) their returns.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any]) -> None:
        """Take over a vector environment.

        Args:
            envs: Its autoreset mode is SAME_STEP. Chunks are executed in pieces if its actions
                have fewer rows than the ``vla_action`` that it observes.

        Raises:
            ConfigError: If it does not fit.
        """
        mode = envs.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise ConfigError(
                "Expected environments that reset in the same step (as stable-baselines3), got "
                f"{mode}: make the vector environment with autoreset_mode='SAME_STEP'."
            )
        self.envs: Any = envs  # those of LIBERO have more than Gymnasium's
        self.num_envs = envs.num_envs
        self.action_space = envs.single_action_space
        self.stride: int | None = None
        self.num_pieces = 1
        space = envs.single_observation_space
        chunk = space.get("vla_action") if isinstance(space, spaces.Dict) else None
        if chunk is not None and chunk.shape != self.action_space.shape:
            assert chunk.shape is not None and self.action_space.shape is not None
            self.stride = int(self.action_space.shape[0])
            self.num_pieces, rest = divmod(chunk.shape[0], self.stride)
            if rest or not hasattr(envs, "send"):
                raise ConfigError(
                    f"The stride must divide the chunk length {chunk.shape[0]}, got {self.stride}; "
                    "it needs LiberoVectorEnv."
                )
            self.action_space = spaces.Box(-1.0, 1.0, chunk.shape, np.float32)
        self.reset_infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        self.lengths = np.zeros(self.num_envs, np.int64)
        self.returns = np.zeros(self.num_envs, np.float64)
        self.started = time.perf_counter()

    def groups(self, count: int) -> list[np.ndarray]:
        """Split the environments into groups that can be stepped by turns.

        Raises:
            ConfigError: If there are fewer environments, or they cannot be split.
        """
        if count == 1:
            return [np.arange(self.num_envs)]
        if not hasattr(self.envs, "groups"):
            raise ConfigError(f"{type(self.envs).__name__} has no groups: set groups to 1.")
        return self.envs.groups(count)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> Any:
        """Reset all environments, as Gymnasium's ``reset``; return a copy of the observations."""
        obs, infos = self.envs.reset(seed=seed, options=options)
        self.lengths[:], self.returns[:] = 0, 0.0
        self.reset_infos[:] = [info_of(infos, i) for i in range(self.num_envs)]
        return own(obs)

    def begin(self, actions: np.ndarray, env_ids: np.ndarray) -> RunningChunks:
        """Begin a chunk (C, 7) in each of some environments."""
        return RunningChunks(self, np.asarray(actions), env_ids)

    def count(
        self,
        env_ids: np.ndarray,
        rewards: np.ndarray,
        dones: np.ndarray,
        infos: Sequence[dict[str, Any]],
    ) -> None:
        """Count chunks and returns; what an episode came to goes into the infos of its end."""
        self.returns[env_ids] += rewards
        self.lengths[env_ids] += 1
        for i in np.flatnonzero(dones).tolist():
            info, env = infos[i], env_ids[i]
            if not info.get("worker_restarted", False):
                stats = info.get("episode_stats", {})
                if self.stride is not None:  # the environment adds up pieces, not chunks
                    info["episode_stats"] = stats = {**stats, "return": float(self.returns[env])}
                info["episode"] = {
                    "r": round(float(stats.get("return", self.returns[env])), 6),
                    "l": int(self.lengths[env]),
                    "t": round(time.perf_counter() - self.started, 6),
                }
            self.lengths[env], self.returns[env] = 0, 0.0


class RunningChunks:
    """One chunk of each of some environments of :class:`ChunkEnvs`; see :meth:`ChunkEnvs.begin`."""

    def __init__(self, chunks: ChunkEnvs, actions: np.ndarray, env_ids: np.ndarray) -> None:
        self.chunks, self.env_ids, self._actions = chunks, env_ids, actions
        count = len(env_ids)
        self._piece, self._going = 0, np.arange(count)  # rows, not environments
        self._rows: list[dict[str, Any]] = [{} for _ in range(count)]
        self._pieces: list[list[Piece]] = [[] for _ in range(count)]
        self._rewards, self._dones = np.zeros(count), np.zeros(count, bool)
        self._obs: Any = None
        self._send_piece()

    @property
    def _is_everyone(self) -> bool:
        return len(self._going) == self.chunks.num_envs

    def _send_piece(self) -> None:
        self._sent, stride = self._actions, self.chunks.stride
        if stride is not None:
            first = self._piece * stride
            self._sent = self._actions[self._going, first : first + stride]
        if not self._is_everyone:
            self.chunks.envs.send(self._sent, self.env_ids[self._going])

    def recv(self) -> ChunkStep | None:
        """Wait for the piece under way; None if it has ended and the next one has begun."""
        if self._is_everyone:  # nobody else takes a turn meanwhile
            result = self.chunks.envs.step(self._sent)
        else:
            result = self.chunks.envs.recv(env_ids=self.env_ids[self._going])
        obs, rewards, terminations, truncations, infos = result
        if self._obs is None:
            self._obs = own(obs)
        else:
            for key, value in obs.items():
                self._obs[key][self._going] = value
        for row, i in enumerate(self._going.tolist()):
            ended = bool(terminations[row] or truncations[row])
            self._dones[i] = ended
            info = self._info(infos, row, i, ended)
            info["TimeLimit.truncated"] = bool(truncations[row] and not terminations[row])
            if self.chunks.stride is None:
                self._rewards[i] = rewards[row]
            else:
                before = self._rows[i].get("executed_steps", 0)
                info["executed_steps"] = before + info.get("executed_steps", 0)
                add_terms(info, self._rows[i])
                after = info.get("terminal_observation") or {k: v[row] for k, v in obs.items()}
                self._pieces[i].append(Piece(own(after), float(rewards[row]), _discount(info)))
            self._rows[i] = info
        self._piece += 1
        self._going = self._going[~self._dones[self._going]]
        if self._piece < self.chunks.num_pieces and len(self._going):
            self._send_piece()
            return None
        return self._finish()

    def _info(self, infos: dict[str, Any], row: int, i: int, ended: bool) -> dict[str, Any]:
        """Return the infos of one environment: of the episode that has ended, if one has."""
        info = info_of(infos, row)
        if ended:  # what stands beside it is of the next episode's beginning
            begun, info = info, info.pop("final_info", {})
            info["terminal_observation"] = own(begun.pop("final_obs"))
            stats = begun.pop("episode_stats", None)
            if stats is not None and not info.get("worker_restarted", False):
                info["episode_stats"] = stats
            self.chunks.reset_infos[int(self.env_ids[i])] = begun
        return info

    def _finish(self) -> ChunkStep:
        if self.chunks.stride is not None:
            for i, (info, pieces) in enumerate(zip(self._rows, self._pieces, strict=True)):
                info["pieces"], info["stride"] = pieces, self.chunks.stride
                self._rewards[i], info["discount"] = joined(pieces)
        self.chunks.count(self.env_ids, self._rewards, self._dones, self._rows)
        return ChunkStep(
            self._obs,
            same_episode(self._obs, self._dones, self._rows),
            self._rewards.astype(np.float32),
            self._dones,
            self._rows,
        )


def same_episode(obs: Any, dones: np.ndarray, infos: Sequence[dict[str, Any]]) -> Any:
    """Return observations in which those that ended an episode stand for those of the next one."""
    if not dones.any():
        return obs
    obs = own(obs)
    for i in np.flatnonzero(dones).tolist():
        last = infos[i]["terminal_observation"]
        if isinstance(obs, dict):
            for key, value in obs.items():
                value[i] = last[key]
        else:
            obs[i] = last
    return obs


def joined(pieces: Iterable[Piece]) -> tuple[float, float]:
    """Return the discounted reward and the discount of pieces that follow each other."""
    reward, discount = 0.0, 1.0
    for piece in pieces:
        reward += discount * piece.reward
        discount *= piece.discount
    return reward, discount


def info_of(infos: dict[str, Any], i: int) -> dict[str, Any]:
    """Return the infos of one environment: those that it has, NumPy scalars as Python's."""
    one: dict[str, Any] = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if mask is None or not mask[i]:  # masks have no mask
            continue
        row = info_of(value, i) if isinstance(value, dict) else value[i]
        if isinstance(row, np.ndarray):
            row = row.copy()
        one[key] = row.item() if isinstance(row, np.generic) else row
    return one


def own(obs: Any) -> Any:
    """Return a copy of an observation: a dict of arrays, or an array."""
    if isinstance(obs, dict):
        return {key: np.array(value) for key, value in obs.items()}
    return np.array(obs)


def _discount(info: dict[str, Any]) -> float:
    if "discount" not in info:
        raise ConfigError("Pieces of chunks are discounted: make the environments with gamma.")
    return float(info["discount"])
