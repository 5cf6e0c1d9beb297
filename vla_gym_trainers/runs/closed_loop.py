"""Greedy evaluation on sampled layouts during training, and the best policy so far."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.errors import ConfigError
from vla_gym_trainers.runs.run_dir import RunDir, replacing

if TYPE_CHECKING:
    from stable_baselines3.common.vec_env import VecEnv

    from vla_gym_trainers.td3.algorithm import TD3BC
    from vla_gym_trainers.td3.policy import RLTokenPolicy

#: A policy: batched observations in, batched chunks out.
Act = Callable[[Mapping[str, np.ndarray]], np.ndarray]
#: Added to a run's seed for the layouts of its evaluation: training seeds are far smaller.
EVAL_SEED = 1_000_000_000


def vla_act(observation: Mapping[str, np.ndarray]) -> np.ndarray:
    """Play the VLA's own chunks."""
    return np.asarray(observation["vla_action"], np.float32)


def play_layouts(env: VecEnv, act: Act, episodes_per_env: int, seed: int) -> dict[int, list[bool]]:
    """Play the same sampled layouts as any other call with this seed.

    Each environment plays its first ``episodes_per_env`` episodes; what a fast one begins beyond
    them does not count, so long episodes weigh as much as short ones.

    Args:
        env: Environments whose episodes follow from the seed alone (not the training's).
        act: The policy.
        episodes_per_env: Counted episodes of each environment.
        seed: Environment i plays seed + i.

    Returns:
        Successes by task, in no particular order. Episodes that a dead worker cut off are left out.
    """
    env.seed(seed)
    obs: Any = env.reset()
    left = np.full(env.num_envs, episodes_per_env)
    outcomes: dict[int, list[bool]] = {}
    while (left > 0).any():
        tasks = np.asarray(obs["task_id"]).reshape(env.num_envs)
        obs, _, dones, infos = env.step(np.clip(act(obs), -1.0, 1.0))
        for i in np.flatnonzero(dones & (left > 0)).tolist():
            left[i] -= 1
            if not infos[i].get("worker_restarted", False):
                outcome = bool(infos[i].get("is_success", False))
                outcomes.setdefault(int(tasks[i]), []).append(outcome)
    return outcomes


def mean_success(outcomes: Mapping[int, list[bool]]) -> float:
    """Return the mean over tasks of the success rate; 0 if nothing was played."""
    return float(np.mean([np.mean(won) for won in outcomes.values()])) if outcomes else 0.0


@dataclass
class BestModel:
    """Evaluates at thresholds of collected chunks and keeps the best policy in ``best.zip``.

    The choice is made on sampled layouts that neither training nor the final evaluation plays, so
    the best of many is not flattered by the states that are reported.

    With ``background`` they are played by a thread, with a copy of the policy, while collecting and
    learning go on; :meth:`poll` then has the result.

    Attributes:
        env: Environments of its own.
        run: Where ``best.zip`` goes.
        every: Chunks between two evaluations.
        episodes_per_env: Counted episodes of each environment.
        seed: Of the layouts.
        background: Play in a thread.
        next_at: Chunks at which the next evaluation is due.
        best: Best mean success so far, None before the first evaluation.
        vla: Mean success of the VLA on the same layouts, once known.
        history: (chunks, mean success, mean success by task) of every evaluation.
    """

    env: VecEnv
    run: RunDir
    every: int
    episodes_per_env: int
    seed: int
    background: bool = False
    next_at: int = 0
    best: float | None = None
    vla: float | None = None
    history: list[tuple[int, float, dict[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.every < 1 or self.episodes_per_env < 1:
            raise ConfigError("every and episodes_per_env must be at least 1.")
        self.next_at = self.next_at or self.every
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._pending: Future[dict[str, float]] | None = None

    def close(self) -> None:
        """Wait for the evaluation under way and end the thread."""
        self._executor.shutdown(wait=True)

    def is_due(self, num_chunks: int) -> bool:
        """Tell whether the threshold is passed (several environments step at once: no modulo).

        Not while an evaluation is under way: the next one begins after it.
        """
        return num_chunks >= self.next_at and self._pending is None

    def begin(self, model: TD3BC, num_chunks: int) -> None:
        """Begin to evaluate the policy as it is now; call it where the model stands still."""
        while self.next_at <= num_chunks:
            self.next_at += self.every
        snapshot = io.BytesIO()
        model.save(snapshot)
        policy = copy.deepcopy(model.policy)
        arguments = (policy, snapshot.getvalue(), num_chunks)
        if self.background:
            self._pending = self._executor.submit(self._evaluate, *arguments)
        else:
            self._pending = Future()
            self._pending.set_result(self._evaluate(*arguments))

    def poll(self, wait: bool = False) -> dict[str, float]:
        """Return the metrics of an evaluation that has ended, see docs/metrics.md; else nothing.

        Args:
            wait: Wait for the one under way. It ends: its environments have deadlines.

        Raises:
            Exception: Whatever ended the evaluation.
        """
        if self._pending is None or not (wait or self._pending.done()):
            return {}
        pending, self._pending = self._pending, None
        return pending.result()

    def _evaluate(self, policy: RLTokenPolicy, model: bytes, num_chunks: int) -> dict[str, float]:
        """Play the policy (and once the VLA) on the layouts; keep the model if it is the best."""
        if self.vla is None:
            self.vla = mean_success(self._play(vla_act))
        outcomes = self._play(lambda obs: policy.predict(obs, deterministic=True)[0])  # type: ignore[arg-type]
        score = mean_success(outcomes)
        by_task = {task: float(np.mean(won)) for task, won in sorted(outcomes.items())}
        self.history.append((num_chunks, score, by_task))
        if self.best is None or score > self.best:
            self.best = score
            with replacing(self.run.best) as file:
                file.write(model)
        metrics = {
            "eval/success": score,
            "eval/best": self.best,
            "eval/vla_success": self.vla,
            "eval/chunks": float(num_chunks),
        }
        return metrics | {f"eval/success_task_{task}": rate for task, rate in by_task.items()}

    def _play(self, act: Act) -> dict[int, list[bool]]:
        return play_layouts(self.env, act, self.episodes_per_env, self.seed)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {key: getattr(self, key) for key in ("next_at", "best", "vla", "history")}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        for key, value in state.items():
            setattr(self, key, list(value) if key == "history" else value)
