"""What a vector environment tells of each of its rows, for :mod:`.wrapper`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.errors import ConfigError
from vla_gym_trainers.world_model.memory import Seen
from vla_gym_trainers.world_model.protocol import WorldModel

Observation = dict[str, Any]


@dataclass(frozen=True)
class RememberedState:
    """State of one environment and of what the world model remembers of its episode.

    Attributes:
        env: State of the wrapped environment.
        memory: (S,) float32.
        tokens: (P,) int64 of the present wrist frame.
        instruction: Of the episode.
        ended: Whether the episode is over.
    """

    env: Any
    memory: np.ndarray
    tokens: np.ndarray
    instruction: str | None
    ended: bool


def row_of(obs: Observation, i: int) -> Observation:
    """Return one row of an observation."""
    return {key: value[i] for key, value in obs.items()}


def batch_of(cameras: Sequence[str], rows: Sequence[tuple[Observation, Any]]) -> Seen:
    """Return observations and their instructions as a batch.

    Raises:
        ConfigError: If an instruction is not known.
    """
    texts = [text for _, text in rows]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(
            "Expected infos with the 'instruction' of every environment: reset it first, and let "
            "the environment put its instruction into info."
        )
    views = {name: np.stack([obs[name] for obs, _ in rows]) for name in {*cameras, "wrist"}}
    return Seen(views, texts, np.stack([obs["proprio"] for obs, _ in rows]))


def hear_instructions(texts: np.ndarray, infos: Mapping[str, Any]) -> None:
    """Write the instructions that infos tell into texts (n,)."""
    if "instruction" in infos:
        told = infos["_instruction"]
        texts[told] = infos["instruction"][told]


def executed_steps(infos: Mapping[str, Any], truncations: np.ndarray, chunk_len: int) -> np.ndarray:
    """Return how many control steps (n,) of the steps were executed; 0 for lost ones."""
    executed = np.full(len(truncations), chunk_len)
    ended = infos.get("final_info", {})  # of the step, where infos are the next episode's
    for source in (infos, ended):
        if "executed_steps" in source:
            told = source["_executed_steps"]
            executed[told] = source["executed_steps"][told]
    # Without autoreset in the same step, a step that was lost is told by the step's own infos.
    lost = ended.get("worker_restarted")
    if "final_obs" not in infos and "worker_restarted" in infos:
        lost = infos["worker_restarted"] & truncations
    if lost is not None:
        executed[lost] = 0
    return executed


def show_terms(infos: dict[str, Any], paid: Mapping[str, np.ndarray], stepped: np.ndarray) -> None:
    """Put reward terms into infos, those of steps that ended an episode into its final info."""
    ended = infos["_final_info"] if "final_info" in infos else np.zeros(len(stepped), bool)
    for place, rows in ((infos, stepped & ~ended), (infos.get("final_info"), stepped & ended)):
        if place is None or not rows.any():
            continue
        shown: dict[str, np.ndarray] = {}
        for name, values in paid.items():
            shown[name], shown[f"_{name}"] = np.where(rows, values, 0.0), rows.copy()
        place["reward_terms"], place["_reward_terms"] = shown, rows.copy()


def check_fit(model: WorldModel, env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
    """Check that an environment fits a model.

    Raises:
        ConfigError: If not.
    """
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
