"""A vector wrapper that carries a world model's memory, and pays for what it thinks of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from vla_gym.errors import ConfigError
from vla_gym_trainers.world_model import rewards as terms
from vla_gym_trainers.world_model.memory import EpisodeMemory
from vla_gym_trainers.world_model.protocol import WorldModel, load_world_model
from vla_gym_trainers.world_model.rows import (
    RememberedState,
    batch_of,
    check_fit,
    executed_steps,
    hear_instructions,
    row_of,
    show_terms,
)

_Obs = dict[str, Any]
_Step = tuple[_Obs, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class WorldModelObservation(
    gym.vector.VectorWrapper[_Obs, np.ndarray, _Obs, np.ndarray, np.ndarray]
):
    """Add the memory of a frozen world model to the observations of N environments.

    It goes directly around :class:`~vla_gym.vector.LiberoVectorEnv`, whose frames the model sees,
    and below :class:`vla_gym.wrappers.vector.FrozenVLAObservation`, which passes the memory on::

        envs = LiberoVectorEnv(16, "goal", chunk_len=4, image_size=128)
        envs = WorldModelObservation(envs, "runs/f1/model", {"uncertainty": 1.0})
        envs = FrozenVLAObservation(envs, "mini")

    The observation gets ``memory`` (S,) float32: the model's state after this observation and all
    before it in the episode. Everything else in it is the wrapped environment's.

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

    ``step_async``, ``send`` and ``reset_send`` take note of what they begin; ``get_state`` and
    ``set_state`` carry the memory along. Every other attribute of the wrapped environment is
    reached through the wrapper. What the model believes was executed are the actions that it was
    stepped with, up to ``infos["executed_steps"]``.
    """

    def __init__(
        self,
        env: gym.vector.VectorEnv[_Obs, np.ndarray, np.ndarray],
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
        self.world_model: WorldModel = world_model
        check_fit(self.world_model, env)
        inner, count = env.single_observation_space, env.num_envs
        assert isinstance(inner, spaces.Dict)
        memory = spaces.Box(-np.inf, np.inf, (world_model.state_size,), np.float32)
        self.single_observation_space = spaces.Dict({**inner.spaces, "memory": memory})
        self.observation_space = batch_space(self.single_observation_space, count)
        self._mode = AutoresetMode(env.metadata["autoreset_mode"])
        self._memory = EpisodeMemory(self.world_model, count)
        # Of every environment: the episode's instruction and whether it is over and the next step
        # resets; the chunk that was begun last, and whether a reset was begun in its place.
        self._instructions = np.full(count, None, dtype=object)
        self._ended, self._resetting = np.zeros(count, bool), np.zeros(count, bool)
        self._actions = np.zeros((count, *(env.single_action_space.shape or ())), np.float32)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)

    # Stepping

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[_Obs, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``; the others remember on."""
        mask = None if options is None else options.get("reset_mask")
        # A copy: Gymnasium's own vector environments take the mask out of the caller's dict.
        options = None if options is None else dict(options)
        obs, infos = self.env.reset(seed=seed, options=options)  # type: ignore[arg-type]
        begun = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask)
        every = np.arange(self.num_envs)
        infos, _ = self._remember(obs, infos, every, np.zeros(self.num_envs, np.int64), begun)
        self._ended[begun] = self._resetting[begun] = False
        return self._with_memory(obs, every), infos

    def step(self, actions: np.ndarray) -> _Step:
        """Step all environments."""
        result = self.env.step(actions)
        self._note(actions, np.arange(self.num_envs))
        return self._convert(result)

    def step_async(self, actions: np.ndarray) -> None:
        """Begin a step of all environments."""
        env: Any = self.env
        env.step_async(actions)
        self._note(actions, np.arange(self.num_envs))

    def step_wait(self, timeout: float | None = None) -> _Step:
        """Wait for what ``step_async`` began; see the wrapped environment."""
        env: Any = self.env
        return self._convert(env.step_wait(timeout=timeout))

    def send(self, actions: np.ndarray, env_ids: Sequence[int] | np.ndarray) -> None:
        """Begin a step of some environments; see the wrapped environment."""
        env: Any = self.env
        env.send(actions, env_ids)
        self._note(actions, np.asarray(env_ids))

    def reset_send(self, env_ids: Sequence[int] | np.ndarray | None = None, **kwargs: Any) -> None:
        """Begin a reset of some environments; see the wrapped environment."""
        env: Any = self.env
        env.reset_send(env_ids, **kwargs)
        self._resetting[slice(None) if env_ids is None else np.asarray(env_ids)] = True

    def recv(self, *args: Any, **kwargs: Any) -> _Step:
        """Wait for what ``send`` or ``reset_send`` began; see the wrapped environment."""
        env: Any = self.env
        return self._convert(env.recv(*args, **kwargs))

    # States

    def get_state(self, env_ids: Sequence[int] | None = None) -> list[RememberedState]:
        """Return the states of environments, all by default; they can be pickled."""
        env: Any = self.env
        states = env.get_state(env_ids)
        ids = range(self.num_envs) if env_ids is None else [int(i) for i in env_ids]
        return [
            RememberedState(
                env=state,
                memory=self._memory.rows(np.array([i]))[0],
                tokens=self._memory.tokens[i].cpu().numpy().copy(),
                instruction=self._instructions[i],
                ended=bool(self._ended[i]),
            )
            for i, state in zip(ids, states, strict=True)
        ]

    def set_state(
        self, states: Sequence[RememberedState], env_ids: Sequence[int] | None = None
    ) -> _Obs:
        """Have environments go on from states, with what was remembered there.

        Returns:
            The observations of all environments.

        Raises:
            ConfigError: If a state is another wrapper's, or of a memory of another size.
        """
        size = self.world_model.state_size
        for state in states:
            if not isinstance(state, RememberedState) or state.memory.shape != (size,):
                raise ConfigError(
                    f"Expected states of this wrapper's get_state() with a memory of {size} "
                    f"numbers, got {type(state).__name__}."
                )
        env: Any = self.env
        obs = env.set_state([state.env for state in states], env_ids)
        ids = range(self.num_envs) if env_ids is None else [int(i) for i in env_ids]
        for i, state in zip(ids, states, strict=True):
            self._memory.states[i] = torch.from_numpy(state.memory)
            self._memory.tokens[i] = torch.from_numpy(state.tokens)
            self._instructions[i], self._ended[i] = state.instruction, state.ended
            self._resetting[i] = False
        return self._with_memory(obs, np.arange(self.num_envs))

    # Inside

    def _note(self, actions: np.ndarray, env_ids: np.ndarray) -> None:
        """Keep the chunks that environments were stepped with, as they are executed."""
        space = self.env.single_action_space
        assert isinstance(space, spaces.Box)
        self._actions[env_ids] = np.clip(actions, space.low, space.high)
        self._resetting[env_ids] = False

    def _convert(self, result: _Step) -> _Step:
        obs, rewards, terminations, truncations, infos = result
        ids = np.asarray(infos.get("env_id", np.arange(self.num_envs)))
        same_step, ended = self._mode == AutoresetMode.SAME_STEP, terminations | truncations
        resets = self._resetting[ids] | self._ended[ids]
        executed = executed_steps(infos, truncations, self._actions.shape[1])
        executed[resets] = 0
        infos, paid = self._remember(obs, infos, ids, executed, resets | (ended & same_step))
        self._ended[ids], self._resetting[ids] = ended & (not same_step), False
        if self.weights is not None:
            stepped = executed > 0
            paid[terms.TASK] = np.where(stepped, rewards, 0.0)
            rewards = np.zeros(len(ids))
            for name, weight in self.weights.items():
                rewards += weight * paid[name]
            show_terms(infos, {name: paid[name] for name in self.weights}, stepped)
        return self._with_memory(obs, ids), rewards, terminations, truncations, infos

    def _remember(
        self,
        obs: _Obs,
        infos: dict[str, Any],
        ids: np.ndarray,
        executed: np.ndarray,
        begun: np.ndarray,
    ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Update the memories.

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
        stepped, fresh = np.flatnonzero(executed), np.flatnonzero(begun)
        # Copies of what is written to: infos may be the environment's own.
        infos, of_finals = dict(infos), self._instructions[ids]
        final_obs: dict[int, _Obs] = {}
        if "final_obs" in infos:
            infos["final_obs"] = infos["final_obs"].copy()
            infos["final_info"] = dict(infos["final_info"])
            finals = np.flatnonzero(infos["_final_obs"]).tolist()
            final_obs = {i: infos["final_obs"][i] for i in finals}
            hear_instructions(of_finals, infos["final_info"])
        texts = self._instructions[ids]
        hear_instructions(texts, infos)
        self._instructions[ids] = texts
        # A final observation belongs to the episode that has just ended.
        rows = [
            (final_obs[i], of_finals[i]) if i in final_obs else (row_of(obs, i), texts[i])
            for i in stepped.tolist()
        ]
        rows += [(row_of(obs, i), texts[i]) for i in fresh.tolist()]
        after, paid = self._memory.rows(ids), dict.fromkeys(terms.TERMS, np.zeros(len(ids)))
        if rows:
            actions = self._executed_actions(ids[stepped], executed[stepped])
            states, found = self._memory.advance(
                batch_of(self.world_model.cameras, rows),
                ids[stepped],
                ids[fresh],
                actions,
                self.weights or (),
            )
            after[stepped] = states
            for name, values in found.items():
                paid[name] = np.zeros(len(ids))
                paid[name][stepped] = values
        for i, final in final_obs.items():
            infos["final_obs"][i] = {**final, "memory": after[i].copy()}
        return infos, paid

    def _executed_actions(self, env_ids: np.ndarray, executed: np.ndarray) -> np.ndarray:
        """Return the chunks (n, C * A) of environments, 0 for control steps not executed."""
        chunks = self._actions[env_ids]
        chunks[np.arange(chunks.shape[1]) >= executed[:, None]] = 0.0
        return chunks.reshape(len(chunks), -1)

    def _with_memory(self, obs: _Obs, ids: np.ndarray) -> _Obs:
        return {**obs, "memory": self._memory.rows(ids)}
