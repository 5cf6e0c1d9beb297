"""Dual validation: student and teacher played greedily from the same starts, and their gap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym.vector import LiberoVectorEnv
from vla_gym_trainers.on_policy.policy import Frames, TokenPolicy
from vla_gym_trainers.on_policy.teacher import Teacher

#: Chooses chunks (B, C, 7) from frames, instructions and proprio.
Play = Callable[[Frames, Sequence[str], np.ndarray], Tensor]
#: (environment, episode) -> (task, success).
Outcomes = dict[tuple[int, int], tuple[int, bool]]


def play_layouts(envs: LiberoVectorEnv, play: Play, episodes_per_env: int, seed: int) -> Outcomes:
    """Play the same sampled layouts as any other call with this seed.

    Every environment plays its first ``episodes_per_env`` episodes and then waits, so that long
    episodes count as much as short ones.

    Args:
        envs: Autoreset mode NEXT_STEP, chunked, both cameras.
        play: Who acts.
        episodes_per_env: Episodes of each environment.
        seed: Environment i plays seed + i.

    Returns:
        Task and success by (environment, episode); episodes that were lost with a worker are
        missing.
    """
    obs, infos = envs.reset(seed=seed)
    count, steps = envs.num_envs, (envs.single_action_space.shape or (0,))[0]
    texts, ids = infos["instruction"].copy(), np.arange(count)
    episode, resetting = np.zeros(count, np.int64), np.zeros(count, bool)
    outcomes: Outcomes = {}
    while len(ids):
        tasks = np.array(obs["task_id"], np.int64)
        frames = {key: value for key, value in obs.items() if value.ndim == 4}
        actions = np.zeros((len(ids), steps, 7), np.float32)
        due = resetting[ids]  # these are reset now: what they are sent is ignored
        if not due.all():
            seen = {camera: images[~due] for camera, images in frames.items()}
            chunks = play(seen, texts[ids[~due]].tolist(), np.array(obs["proprio"])[~due])
            actions[~due] = np.clip(chunks[:, :steps].cpu().numpy(), -1.0, 1.0)
        envs.send(actions, ids)
        obs, _, terminated, truncated, infos = envs.recv()
        texts[ids[due]] = infos["instruction"][due]
        over = ~due & (terminated | truncated)
        lost = infos.get("worker_restarted", np.zeros(len(ids), bool))
        for row in np.flatnonzero(over & ~lost).tolist():
            key = int(ids[row]), int(episode[ids[row]])
            outcomes[key] = int(tasks[row]), bool(terminated[row])
        episode[ids[over]] += 1
        resetting[ids] = over
        more = episode[ids] < episodes_per_env
        obs = {key: value[more] for key, value in obs.items()}
        ids = ids[more]
    return outcomes


def success_by_task(outcomes: Outcomes) -> dict[int, float]:
    """Return the success rate of every task that was played."""
    tasks: dict[int, list[bool]] = {}
    for task, won in outcomes.values():
        tasks.setdefault(task, []).append(won)
    return {task: float(np.mean(won)) for task, won in sorted(tasks.items())}


def mean_success(outcomes: Outcomes) -> float:
    """Return the mean over tasks of their success rates; 0 if nothing was played."""
    rates = success_by_task(outcomes)
    return float(np.mean(list(rates.values()))) if rates else 0.0


@dataclass
class Validation:
    """Evaluates by thresholds of control steps; remembers the best success.

    The layouts are sampled by a seed of their own: neither training nor the official states see
    them. The teacher never changes, so it plays once.

    Attributes:
        envs: Environments of its own.
        policy: The student.
        teacher: Or None.
        every: Control steps between two evaluations; the first one is at 0.
        episodes_per_env: Episodes of each environment.
        seed: Of the layouts.
        next_at: Control steps at which the next evaluation is due.
        best: Best mean success so far.
        history: (control steps, mean success of the student) of every evaluation.
    """

    envs: LiberoVectorEnv
    policy: TokenPolicy
    teacher: Teacher | None
    every: int
    episodes_per_env: int
    seed: int
    next_at: int = 0
    best: float | None = None
    history: list[tuple[int, float]] = field(default_factory=list)
    _taught: Outcomes | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: If a number is not positive.
        """
        if self.every < 1 or self.episodes_per_env < 1:
            raise ConfigError("every and episodes_per_env must be at least 1.")

    def is_due(self, steps: int) -> bool:
        """Tell whether a threshold is passed."""
        return steps >= self.next_at

    def evaluate(self, steps: int) -> tuple[dict[str, float], bool]:
        """Play the student, and once the teacher.

        Returns:
            Metrics (see docs/on_policy.md), and whether the student is better than ever.
        """
        while self.next_at <= steps:
            self.next_at += self.every
        won = self._play(lambda *x: self.policy.act(*x).actions)
        score = mean_success(won)
        is_best = self.best is None or score > self.best
        self.best = score if is_best else self.best
        self.history.append((steps, score))
        assert self.best is not None
        metrics = {"eval/success": score, "eval/best": self.best, "eval/episodes": float(len(won))}
        by_task = success_by_task(won)
        metrics |= {f"eval/success_task_{task}": rate for task, rate in by_task.items()}
        if self.teacher is not None:
            if self._taught is None:
                teacher = self.teacher
                self._taught = self._play(lambda *x: teacher(*x).actions)
            metrics |= self._gap(won, self._taught)
        return metrics, is_best

    @staticmethod
    def _gap(won: Outcomes, taught: Outcomes) -> dict[str, float]:
        both = won.keys() & taught.keys()
        return {
            "eval/teacher_success": mean_success(taught),
            "eval/gap": mean_success(won) - mean_success(taught),
            "eval/student_only": float(sum(won[k][1] > taught[k][1] for k in both)),
            "eval/teacher_only": float(sum(won[k][1] < taught[k][1] for k in both)),
        }

    def _play(self, play: Play) -> Outcomes:
        def shrunk(frames: Frames, texts: Sequence[str], proprio: np.ndarray) -> Tensor:
            return play(self.policy.shrink(frames), texts, proprio)

        return play_layouts(self.envs, shrunk, self.episodes_per_env, self.seed)

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain numbers."""
        taught = self._taught
        return {
            "next_at": self.next_at,
            "best": self.best,
            "history": [list(pair) for pair in self.history],
            "taught": None if taught is None else [[*k, *v] for k, v in sorted(taught.items())],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        self.next_at, self.best = state["next_at"], state["best"]
        self.history = [(int(steps), float(score)) for steps, score in state["history"]]
        if state["taught"] is not None:
            self._taught = {(i, k): (task, bool(won)) for i, k, task, won in state["taught"]}
