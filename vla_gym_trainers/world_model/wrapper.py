"""A vector wrapper that carries a world model's memory, and pays for what it thinks of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from vla_gym.errors import ConfigError
from vla_gym.wrappers.vector_base import Obs, Step, VectorEpisodeWrapper
from vla_gym.wrappers.vla_state import check_told, heard
from vla_gym_trainers.world_model import rewards as terms
from vla_gym_trainers.world_model.memory import WorldMemory
from vla_gym_trainers.world_model.protocol import WORLD_MEMORY, WorldModel, load_world_model


class WorldModelObservation(VectorEpisodeWrapper):
    """Add the memory of a frozen world model to the observations of N environments.

    It goes directly around :class:`~vla_gym.vector.LiberoVectorEnv`, whose frames the model sees,
    and below :class:`vla_gym.wrappers.vector.FrozenVLAObservation`, which passes the memory on::

        envs = LiberoVectorEnv(16, "goal", chunk_len=4, image_size=128)
        envs = WorldModelObservation(envs, "runs/f1/model", {"uncertainty": 1.0})
        envs = FrozenVLAObservation(envs, "mini")

    The observation gets ``world_memory`` (S,) float32: the model's state after this observation and
    all before it in the episode. Everything else in it is the wrapped environment's.

    **Rewards.** With weights the reward becomes the weighted sum of terms, see :mod:`.rewards`, and
    each term stands, without its weight, in ``infos["reward_terms"]``, of an environment that was
    reset in the same step in ``infos["final_info"]["reward_terms"]``. A weight of 0 only shows the
    term. A step that resets an environment has none and is paid 0, and so is one that was lost with
    its worker. ``success``, ``terminations`` and ``episode_stats`` stay the task's.

    **When the memory changes.** It begins anew at an episode's first frame, in any autoreset mode
    and in resets of some environments (``options["reset_mask"]``); a final observation
    (``infos["final_obs"]``) has the memory of the episode that has ended; a step in which nothing
    was executed, as one that was lost with its worker, leaves it as it was. All environments that
    were stepped together share one forward pass, so a row differs from a single environment's by
    the rounding of batched matrix products only.

    ``step_async``, ``send``, ``reset_send``, ``get_state`` and ``set_state`` work where the wrapped
    environment has them, every other attribute of it is reached through the wrapper. What the model
    believes was executed are the actions that an environment was stepped with, up to
    ``infos["executed_steps"]``.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv[Obs, np.ndarray, np.ndarray],
        world_model: str | Path | WorldModel,
        rewards: Mapping[str, float] | None = None,
        *,
        device: str = "cpu",
    ) -> None:
        """Wrap a vector of chunked LIBERO environments.

        Args:
            env: It observes the model's cameras in its image size, and its steps have the model's
                ``chunk_len``; its infos hold ``instruction``.
            world_model: See :func:`.protocol.load_world_model`; or the model itself.
            rewards: Weights by term; None leaves the reward as it is.
            device: Torch device of a model that is loaded here.

        Raises:
            ConfigError: If the environment does not fit the model, or a term is unknown.
            WeightsError: If the model's files are missing or damaged.
        """
        super().__init__(env)
        self.weights = None if rewards is None else terms.check_weights(rewards)
        if isinstance(world_model, str | Path):
            world_model = load_world_model(world_model, device)
        if not isinstance(world_model, WorldModel):
            raise ConfigError(
                f"world_model must be a run, a model/ folder or a WorldModel, got "
                f"{world_model!r:.80}."
            )
        self.world_model: WorldModel = world_model
        _check_fit(self.world_model, env)
        inner, count = env.single_observation_space, env.num_envs
        assert isinstance(inner, spaces.Dict)
        memory = spaces.Box(-np.inf, np.inf, (world_model.state_size,), np.float32)
        self.single_observation_space = spaces.Dict({**inner.spaces, WORLD_MEMORY: memory})
        self.observation_space = batch_space(self.single_observation_space, count)
        self.memory = WorldMemory(self.world_model, count)
        self._instructions = np.full(count, None, dtype=object)

    def _convert_reset(
        self, obs: Obs, infos: dict[str, Any], env_ids: np.ndarray
    ) -> tuple[Obs, dict[str, Any]]:
        self._ended[env_ids] = False
        begun = np.isin(self._everyone, env_ids)
        infos, _ = self._remember(obs, infos, self._everyone, 0 * self._everyone, begun)
        return self._observe(obs, self._everyone), infos

    def _convert_step(self, result: Step) -> Step:
        obs, rewards, terminations, truncations, infos = result
        ids, begun, executed = self._steps(infos, terminations | truncations)
        infos, paid = self._remember(obs, infos, ids, executed, begun)
        if self.weights is not None:
            stepped = executed > 0
            paid[terms.TASK] = np.where(stepped, rewards, 0.0)
            rewards = np.zeros(len(ids))
            for name, weight in self.weights.items():
                rewards += weight * paid[name]
            _show(infos, {name: paid[name] for name in self.weights}, stepped)
        return self._observe(obs, ids), rewards, terminations, truncations, infos

    def _remember(
        self,
        obs: Obs,
        infos: dict[str, Any],
        ids: np.ndarray,
        executed: np.ndarray,
        begun: np.ndarray,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Update the memories with one forward pass.

        Args:
            obs: n rows.
            infos: Of these rows.
            ids: (n,) their environments.
            executed: (n,) control steps that were executed; 0 leaves the memory as it is.
            begun: (n,) bool: rows of ``obs`` that begin an episode.

        Returns:
            Infos whose final observations have their memory, and the model's reward terms (n,) by
            name; 0 where nothing was executed.
        """
        # Copies of what is written to: infos may be the environment's own.
        infos, final_obs = dict(infos), dict[int, Obs]()
        if "final_obs" in infos:
            infos["final_obs"] = infos["final_obs"].copy()
            infos["final_info"] = dict(infos["final_info"])
            finals = np.flatnonzero(infos["_final_obs"]).tolist()
            final_obs = {i: infos["final_obs"][i] for i in finals}
        before = self._instructions[ids]
        of_finals = heard(before, infos.get("final_info", {}))
        texts = self._instructions[ids] = heard(before, infos)
        stepped, fresh = np.flatnonzero(executed), np.flatnonzero(begun)
        # A final observation belongs to the episode that has just ended.
        rows = [
            (final_obs[i], of_finals[i]) if i in final_obs else (_row(obs, i), texts[i])
            for i in stepped.tolist()
        ]
        rows += [(_row(obs, i), texts[i]) for i in fresh.tolist()]
        after, paid = self.memory.rows(ids), {name: np.zeros(len(ids)) for name in terms.TERMS}
        if rows:
            after[stepped], found = self.memory.advance(
                *_batch(self.world_model.cameras, rows),
                ids[stepped],
                ids[fresh],
                self._executed_actions(ids[stepped], executed[stepped]),
                self.weights or (),
            )
            for name, values in found.items():
                paid[name][stepped] = values
        for i, final in final_obs.items():
            infos["final_obs"][i] = {**final, WORLD_MEMORY: after[i].copy()}
        return infos, paid

    def _executed_actions(self, env_ids: np.ndarray, executed: np.ndarray) -> np.ndarray:
        """Return the chunks (n, C * A) that environments executed, 0 for the rest of a chunk."""
        space = self.env.single_action_space
        assert isinstance(space, spaces.Box)
        chunks = np.clip(self._actions[env_ids], space.low, space.high)  # as the simulator does
        chunks[np.arange(chunks.shape[1]) >= executed[:, None]] = 0.0
        return chunks.reshape(len(chunks), self._actions[0].size)

    def _observe(self, obs: Obs, env_ids: np.ndarray) -> Obs:
        return {**obs, WORLD_MEMORY: self.memory.rows(env_ids)}

    def _save(self, env_id: int) -> dict[str, Any]:
        return {
            "memory": self.memory.rows(np.array([env_id]))[0],
            "tokens": self.memory.tokens[env_id].cpu().numpy().copy(),
            "visited": frozenset(self.memory.visited[env_id]),
            "instruction": self._instructions[env_id],
        }

    def _check(self, kept: Mapping[str, Any]) -> None:
        sizes = self.world_model.state_size, self.world_model.num_tokens
        if (found := (len(kept["memory"]), len(kept["tokens"]))) != sizes:
            raise ConfigError(
                f"Expected a memory of {sizes[0]} numbers and {sizes[1]} tokens, got {found[0]} "
                f"and {found[1]}: both environments need the same world model."
            )

    def _restore(self, env_id: int, kept: Mapping[str, Any]) -> None:
        self.memory.states[env_id] = torch.from_numpy(kept["memory"])
        self.memory.tokens[env_id] = torch.from_numpy(kept["tokens"])
        self.memory.visited[env_id] = set(kept["visited"])
        self._instructions[env_id] = kept["instruction"]


def _row(obs: Obs, i: int) -> Obs:
    """Return one row of an observation."""
    return {key: value[i] for key, value in obs.items()}


def _batch(
    cameras: Sequence[str], rows: Sequence[tuple[Obs, Any]]
) -> tuple[dict[str, np.ndarray], list[str], np.ndarray]:
    """Return views, instructions, which must be known, and proprioception as a batch."""
    texts = check_told([text for _, text in rows])
    views = {name: np.stack([obs[name] for obs, _ in rows]) for name in {*cameras, "wrist"}}
    return views, texts, np.stack([obs["proprio"] for obs, _ in rows])


def _show(infos: dict[str, Any], paid: Mapping[str, np.ndarray], stepped: np.ndarray) -> None:
    """Put reward terms into infos, those of steps that ended an episode into its final info."""
    ended = infos["_final_info"] if "final_info" in infos else np.zeros(len(stepped), bool)
    for place, rows in ((infos, stepped & ~ended), (infos.get("final_info"), stepped & ended)):
        if place is None or not rows.any():
            continue
        shown: dict[str, np.ndarray] = {}
        for name, values in paid.items():
            shown[name], shown[f"_{name}"] = np.where(rows, values, 0.0), rows.copy()
        place["reward_terms"], place["_reward_terms"] = shown, rows.copy()


def _check_fit(model: WorldModel, env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
    """Refuse an environment that does not fit a model."""
    observed, action = env.single_observation_space, env.single_action_space.shape
    found = observed.spaces if isinstance(observed, spaces.Dict) else {}
    wanted: dict[str, tuple[int, ...]]
    wanted = {name: (model.image_size, model.image_size, 3) for name in {*model.cameras, "wrist"}}
    wanted["proprio"] = (model.proprio_size,)
    shapes = {name: found[name].shape if name in found else None for name in wanted}
    if shapes != wanted:
        raise ConfigError(
            f"The world model expects observations {wanted}, this environment has {shapes}: give "
            f"it cameras={model.cameras} and image_size={model.image_size}."
        )
    if action != (model.chunk_len, model.action_size):
        raise ConfigError(
            f"The world model expects actions of shape ({model.chunk_len}, {model.action_size}), "
            f"got {action}: make the environment with chunk_len={model.chunk_len}, or train a "
            "world model with this one's."
        )
