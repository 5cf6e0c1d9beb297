"""Greedy evaluation: the VLA alone and a trained policy through exactly the same action path."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np

import vla_gym
from vla_gym.errors import ConfigError, WeightsError
from vla_gym.suites import NUM_INIT_STATES
from vla_gym_trainers.eval_result import EvalResult, compare_results, format_table, summarize
from vla_gym_trainers.result_card import environment_facts, make_card, write_json

assert vla_gym.__version__  # importing it registers the environment ids

__all__ = [
    "EvalConfig",
    "EvalResult",
    "VLAPolicy",
    "compare_results",
    "evaluate",
    "format_table",
    "load_policy",
    "make_env",
    "play_episode",
    "run_eval",
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


@dataclass
class EvalConfig:
    """Evaluate the VLA, and a trained policy if one is given, on official initial states."""

    policy: Path | None = None
    """Trained policy (a .zip of vla-gym-train td3), or its run directory. None: the VLA alone."""
    suite: str = "goal"
    """Suite name."""
    task_ids: tuple[int, ...] = (0,)
    """Tasks to play."""
    num_states: int = NUM_INIT_STATES
    """Official states per task, from the first one on (1..50)."""
    vla: str = "mini"
    """Name or directory of the frozen VLA."""
    chunk_len: int | None = None
    """Control steps executed per chunk. Default: the policy's, or the VLA's horizon."""
    assets: str = "lite"
    """Asset pack: lite, libero, or a path."""
    physics: Literal["fast", "exact"] = "fast"
    """Physics mode."""
    out: Path | None = None
    """Result card to write (JSON)."""
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_states <= NUM_INIT_STATES:
            raise ConfigError(f"num_states must be in 1..{NUM_INIT_STATES}, got {self.num_states}.")
        if not self.task_ids:
            raise ConfigError("task_ids is empty: give at least one task.")


def run_eval(config: EvalConfig) -> dict[str, Any]:
    """Evaluate as configured and return the result card (written to ``config.out`` if given)."""
    policy = None if config.policy is None else load_policy(config.policy)
    chunk_len = config.chunk_len
    if policy is not None:
        trained = int(policy.action_space.shape[0])
        if chunk_len not in (None, trained):
            raise ConfigError(f"The policy acts in chunks of {trained}, not {chunk_len}.")
        chunk_len = trained
    env = make_env(
        config.suite,
        task_ids=config.task_ids,
        vla=config.vla,
        chunk_len=chunk_len,
        assets=config.assets,
        physics=config.physics,
    )
    try:
        baseline, trained_results = [], []
        for task_id in config.task_ids:
            states = range(config.num_states)
            common: dict[str, Any] = {"env": env, "progress": config.progress}
            baseline.append(evaluate(None, config.suite, task_id, states, **common))
            if policy is not None:
                trained_results.append(evaluate(policy, config.suite, task_id, states, **common))
        facts = environment_facts(env)
    finally:
        env.close()
    card = make_card(
        "eval",
        config=config,
        seeds={},
        environment=facts,
        results=summarize(baseline, trained_results),
    )
    if config.out is not None:
        write_json(config.out, card)
    return card


def load_policy(path: Path) -> Any:
    """Load a trained policy from a .zip or from a run directory's ``policy.zip``.

    Raises:
        WeightsError: If there is no such file or it cannot be read.
    """
    from vla_gym_trainers.td3bc import TD3BC

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
