"""Closed-loop episodes of a frozen VLA on sampled layouts, one environment at a time.

For quick looks during training and for collecting hidden states. Published numbers come from
``vla-gym eval`` on the official initial states, which training must not touch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from vla_gym.envs.libero import LiberoEnv
from vla_gym.suites import SUITES, Task, suite_tasks
from vla_gym.vla import FrozenVLA, load


class Episode(NamedTuple):
    """One closed-loop episode.

    Attributes:
        task: The task that was played.
        success: Whether its goal was reached.
        steps: Control steps until success or the limit.
        hidden: (T, M, H) float32, the VLA's hidden states, one per chunk.
    """

    task: Task
    success: bool
    steps: int
    hidden: torch.Tensor


def tasks_of_instructions(instructions: Sequence[str]) -> list[Task]:
    """Return the first task of the suites with each instruction; unknown ones are left out."""
    tasks = {task.instruction: task for suite in reversed(SUITES) for task in suite_tasks(suite)}
    return [tasks[text] for text in instructions if text in tasks]


def play_episodes(
    vla: FrozenVLA,
    tasks: Sequence[Task],
    episodes: int,
    *,
    seed: int = 0,
    chunk_len: int | None = None,
    noise: float = 0.0,
) -> Iterator[Episode]:
    """Play ``episodes`` sampled layouts of each task; episode k of a task has seed ``seed + k``.

    Args:
        vla: The policy.
        tasks: Tasks in the order they are played.
        episodes: Episodes a task.
        seed: First seed; the layout and nothing else depends on it.
        chunk_len: Executed rows of each chunk; default is the VLA's horizon.
        noise: Standard deviation of noise on translation (a third of it on rotation), to visit
            states beside the policy's own path.
    """
    rng = np.random.default_rng(seed)
    scale = noise * np.array([1, 1, 1, 1 / 3, 1 / 3, 1 / 3, 0])
    for suite in dict.fromkeys(task.suite for task in tasks):
        env = LiberoEnv(suite, chunk_len=chunk_len or vla.horizon, image_size=vla.image_size)
        rows = env.action_space.shape[0] if env.action_space.shape else vla.horizon
        try:
            for task in (task for task in tasks if task.suite == suite):
                for k in range(episodes):
                    obs, info = env.reset(seed=seed + k, options={"task_id": task.task_id})
                    hidden, over = [], False
                    while not over:
                        images = {key: obs[key][None] for key in ("agentview", "wrist")}
                        out = vla.infer(images, [task.instruction], obs["proprio"][None])
                        hidden.append(out.hidden.cpu())
                        action = out.actions[0, :rows].cpu().numpy()
                        action = action + scale * rng.normal(size=action.shape)
                        obs, _, terminated, truncated, info = env.step(np.clip(action, -1, 1))
                        over = terminated or truncated
                    states = torch.cat(hidden)
                    yield Episode(task, bool(info["success"]), info["elapsed_steps"], states)
        finally:
            env.close()


def evaluate_sampled(
    vla: str | FrozenVLA,
    tasks: Sequence[Task],
    episodes: int,
    *,
    seed: int = 10_000,
    chunk_len: int | None = None,
) -> dict[str, dict[str, float]]:
    """Count successes per task; see :func:`play_episodes`.

    Returns:
        ``{"<suite>/<task_id>": {"successes", "episodes", "mean_steps"}}``; ``mean_steps`` is over
        the successful episodes (0 if there are none).
    """
    model = load(vla) if isinstance(vla, str) else vla
    table: dict[str, dict[str, float]] = {}
    bar = tqdm(total=len(tasks) * episodes, desc="closed loop", unit="episode")
    for episode in play_episodes(model, tasks, episodes, seed=seed, chunk_len=chunk_len):
        key = f"{episode.task.suite}/{episode.task.task_id}"
        row = table.setdefault(key, {"successes": 0, "episodes": 0, "mean_steps": 0.0})
        row["episodes"] += 1
        if episode.success:
            row["mean_steps"] += (episode.steps - row["mean_steps"]) / (row["successes"] + 1)
            row["successes"] += 1
        bar.update()
        bar.set_postfix_str(f"{key}: {row['successes']:.0f}/{row['episodes']:.0f}")
    bar.close()
    return table
