"""Greedy evaluation on one environment that is there, as training does at its end.

The VLA alone and a trained policy take exactly the same action path. ``vla-gym eval`` plays many
environments at once, see :mod:`vla_gym_trainers.evaluation`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
import numpy as np

import vla_gym
from vla_gym.errors import ConfigError, WeightsError
from vla_gym.suites import NUM_INIT_STATES
from vla_gym_trainers.evaluation.eval_result import (
    EvalResult,
    compare_results,
    format_table,
    summarize,
)

assert vla_gym.__version__  # importing it registers the environment ids

__all__ = [
    "EvalResult",
    "VLAPolicy",
    "compare_results",
    "evaluate",
    "format_table",
    "load_policy",
    "make_env",
    "play_episode",
    "summarize",
]


class GreedyPolicy(Protocol):
    """Anything with SB3's ``predict``."""

    def predict(
        self, observation: dict[str, Any], *, deterministic: bool
    ) -> tuple[np.ndarray, Any]:
        """Return the action of one observation, and a state that is ignored."""
        ...


class VLAPolicy:
    """The frozen VLA itself: executes the chunk that it proposes."""

    def predict(
        self,
        observation: dict[str, Any],
        *,
        deterministic: bool = True,  # noqa: ARG002
    ) -> tuple[np.ndarray, None]:
        """Return ``observation["vla_action"]``."""
        return np.array(observation["vla_action"], np.float32), None


def evaluate(
    policy: GreedyPolicy | None,
    suite: str,
    task_id: int,
    init_state_ids: Iterable[int] = range(NUM_INIT_STATES),
    *,
    name: str | None = None,
    env: gym.Env[Any, Any] | None = None,
    progress: bool = False,
    **env_kwargs: Any,
) -> EvalResult:
    """Play a policy greedily on official initial states of one task.

    Both the VLA and a learned policy hand a (C, 7) chunk in [-1, 1] to the same environment, which
    clips it and lets the simulation take the gripper's sign; nothing else differs.

    Args:
        policy: Object with SB3's ``predict``; None plays the VLA itself.
        suite: Suite name.
        task_id: Task index.
        init_state_ids: Official states to play, in this order.
        name: Name in the result (default ``"vla"`` or ``"policy"``).
        env: A ``LiberoVLA-*`` environment to use and leave open; made and closed here if None.
        progress: Show a progress bar.
        **env_kwargs: Passed on to ``gym.make`` (vla, chunk_len, assets, physics, ...).

    Raises:
        ConfigError: If no state is given.
    """
    states = tuple(int(i) for i in init_state_ids)
    if not states:
        raise ConfigError("init_state_ids is empty: give at least one official state (0..49).")
    player = VLAPolicy() if policy is None else policy
    label = name or ("vla" if policy is None else "policy")
    own_env = env is None
    if env is None:
        env = make_env(suite, task_ids=task_id, **env_kwargs)
    started = time.perf_counter()
    try:
        episodes = [
            play_episode(env, player, {"task_id": task_id, "init_state_id": state})
            for state in _with_bar(states, f"{label} on {suite} {task_id}", progress)
        ]
    finally:
        if own_env:
            env.close()
    squares = np.concatenate([episode.squared_distances for episode in episodes])
    return EvalResult(
        policy=label,
        suite=suite,
        task_id=task_id,
        init_state_ids=states,
        successes=tuple(episode.success for episode in episodes),
        control_steps=tuple(episode.control_steps for episode in episodes),
        reference_rms=float(np.sqrt(squares.mean())),
        seconds=time.perf_counter() - started,
    )


@dataclass
class Episode:
    """One greedy episode.

    Attributes:
        success: The goal was reached.
        control_steps: Control steps executed.
        squared_distances: Mean squared difference to the VLA's chunk, one number per chunk.
    """

    success: bool = False
    control_steps: int = 0
    squared_distances: list[float] = field(default_factory=list)


def play_episode(
    env: gym.Env[Any, Any],
    policy: GreedyPolicy,
    options: dict[str, Any] | None = None,
    seed: int | None = None,
) -> Episode:
    """Play one greedy episode to its end.

    Args:
        env: A ``LiberoVLA-*`` environment.
        policy: The policy.
        options: Reset options (``task_id``, ``init_state_id``).
        seed: Reset seed.
    """
    episode = Episode()
    obs, _ = env.reset(seed=seed, options=options)
    done = False
    while not done:
        action, _ = policy.predict(obs, deterministic=True)
        difference = np.clip(action, -1.0, 1.0) - obs["vla_action"]
        episode.squared_distances.append(float(np.mean(np.square(difference))))
        obs, _, terminated, truncated, info = env.step(action)
        episode.control_steps += int(info["executed_steps"])
        episode.success = bool(info["success"])
        done = terminated or truncated
    return episode


def load_policy(path: Path) -> Any:
    """Load a trained policy from a .zip or a run directory's ``policy.zip``.

    Raises:
        WeightsError: If there is no such file or it cannot be read.
    """
    from vla_gym_trainers.td3.algorithm import TD3BC

    file = path / "policy.zip" if path.is_dir() else path
    if not file.is_file():
        raise WeightsError(
            f"No trained policy at {file}: expected a .zip that 'vla-gym-train td3' wrote, or its "
            "run directory."
        )
    try:
        return TD3BC.load(file, device="cpu", custom_objects={"buffer_size": 1})
    except Exception as error:  # zipfile, pickle and torch each raise their own kinds
        raise WeightsError(f"{file} is not a TD3BC checkpoint or is corrupt: {error}") from error


def make_env(suite: str, **kwargs: Any) -> gym.Env[Any, Any]:
    """Make ``LiberoVLA-<suite>-v0`` without Gymnasium's per-step checker, which copies a lot."""
    suite = suite.removeprefix("libero_")
    return gym.make(f"LiberoVLA-{suite}-v0", disable_env_checker=True, **kwargs)


def _with_bar(items: Sequence[int], title: str, show: bool) -> Iterable[int]:
    if not show:
        return items
    from tqdm import tqdm

    return tqdm(items, desc=title, unit="episode")
