"""Dual validation: student and teacher played greedily from the same starts, and their gap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_gym.rollout import Episode, Start, rollout
from vla_gym.rollout.episodes import mean_success, success_by_task
from vla_gym.rollout.policies import BATCH_SIZE, Info, Observations, in_episodes
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla.stateful import VLAMemory
from vla_gym_trainers.evaluation.summary import compare
from vla_gym_trainers.on_policy.phases import Teacher
from vla_gym_trainers.on_policy.policy import Observation, Policy
from vla_gym_trainers.rollout.memory import EpisodeMemory

#: Chooses chunks: the result has ``actions`` (B, C, 7).
Choose = Callable[[Observation, Sequence[str]], Any]


class GreedyPlayer:
    """Lets a policy or a teacher play episodes, greedily; see ``rollout.Policy``.

    Attributes:
        memory: What is carried from chunk to chunk, by environment.
        batch_size: Rows of a forward pass.
    """

    expert = False

    def __init__(self, choose: Choose, policy: Policy, chunk_len: int) -> None:
        """Name who chooses, whose images it sees, and the rows of a chunk that are executed."""
        self._choose, self._policy, self.chunk_len = choose, policy, chunk_len
        self._vla_memory = VLAMemory(policy.vla)
        self.cameras: tuple[str, ...] = policy.vla.cameras
        self.image_size, self.name = policy.image_size, "policy"
        self.wrap_envs: Callable[[Any], Any] | None = None
        self.identity: dict[str, Any] = {"kind": "student"}
        self.memory, self.batch_size = EpisodeMemory(policy.carried), BATCH_SIZE

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Return the chunks."""
        return self.memory.act(self._forward, observations, infos, self.batch_size)

    def _act(self, seen: Observation, texts: Sequence[str], infos: Sequence[Info]) -> Any:  # noqa: ARG002
        return self._choose(seen, texts)

    def _forward(
        self, observations: dict[str, np.ndarray], infos: list[Info]
    ) -> tuple[np.ndarray, np.ndarray]:
        texts, vla = [info["instruction"] for info in infos], in_episodes(self._vla_memory, infos)
        seen = self._policy.observe(observations, texts, vla)
        seen |= {name: observations[name] for name in self.memory.shapes}
        act = self._act(seen, texts, infos)
        chunks = np.clip(act.actions[:, : self.chunk_len].cpu().numpy(), -1.0, 1.0)
        memory = getattr(act, "next_memory", None)  # a teacher has none
        if memory is None:
            return chunks, np.zeros((len(chunks), self._policy.memory_size), np.float32)
        return chunks, memory.cpu().numpy()


@dataclass
class Validation:
    """Evaluates by thresholds of control steps; remembers the best success.

    The layouts are sampled by a seed of their own: neither training nor the official states see
    them. The teacher never changes, so it plays once.

    Attributes:
        envs: Environments of its own, in autoreset mode DISABLED.
        policy: The student.
        teacher: Who it is compared with.
        starts: Sampled layouts, the same at every evaluation.
        every: Control steps between two evaluations; the first one is at 0.
        next_at: Control steps at which the next evaluation is due.
        best: Best mean success so far.
        history: (control steps, mean success of the student) of every evaluation.
    """

    envs: LiberoVectorEnv
    policy: Policy
    teacher: Teacher
    starts: Sequence[Start]
    every: int
    next_at: int = 0
    best: float | None = None
    history: list[tuple[int, float]] = field(default_factory=list)
    _taught: list[Episode] | None = None

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
        episodes = self._play(self.policy.act)
        score = mean_success(episodes)
        is_best = self.best is None or score > self.best
        self.best = score if is_best else self.best
        self.history.append((steps, score))
        assert self.best is not None
        metrics = {
            "eval/success": score,
            "eval/best": self.best,
            "eval/episodes": float(len(episodes)),
        }
        by_task = success_by_task(episodes)
        metrics |= {f"eval/success_task_{task}": rate for task, rate in by_task.items()}
        if self._taught is None:
            self._taught = self._play(self.teacher)
        paired, rate = compare(episodes, self._taught)["total"], mean_success(self._taught)
        metrics |= {
            "eval/teacher_success": rate,
            "eval/gap": score - rate,
            "eval/student_only": float(paired["wins"]),
            "eval/teacher_only": float(paired["losses"]),
        }
        return metrics, is_best

    def _play(self, choose: Choose) -> list[Episode]:
        chunk_len = (self.envs.single_action_space.shape or (0,))[0]
        player = GreedyPlayer(choose, self.policy, chunk_len)
        return list(rollout(self.envs, player, self.starts))

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain numbers."""
        taught = self._taught
        return {
            "next_at": self.next_at,
            "best": self.best,
            "history": [list(pair) for pair in self.history],
            "taught": None if taught is None else sorted([*e.start, e.success] for e in taught),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        self.next_at, self.best = state["next_at"], state["best"]
        self.history = [(int(steps), float(score)) for steps, score in state["history"]]
        if state["taught"] is not None:
            self._taught = [Episode(Start(*s), won, won, not won, 0) for *s, won in state["taught"]]
