"""Dual validation: student and teacher played greedily from the same starts, and their gap."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vla_gym.rollout import Episode, Start, rollout
from vla_gym.rollout.episodes import mean_success, success_by_task
from vla_gym.rollout.policies import BATCH_SIZE, Info, Observations, episode_key, in_episodes
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla.stateful import VLAMemory
from vla_gym_trainers.evaluation.summary import compare
from vla_gym_trainers.on_policy.phases import Teacher
from vla_gym_trainers.on_policy.policy import Policy
from vla_gym_trainers.rollout.memory import EpisodeMemory

#: Chooses chunks from observations, texts and perhaps keys; the result has ``actions`` (B, C, 7).
Choose = Callable[..., Any]


class PolicyPlayer:
    """Lets a policy or a teacher play episodes, greedily or with draws; see ``rollout.Policy``.

    Attributes:
        memory: What is carried from chunk to chunk, by environment.
        batch_size: Rows of a forward pass.
    """

    expert = False

    def __init__(
        self, choose: Choose, policy: Policy, chunk_len: int, seed: int | None = None
    ) -> None:
        """Name who chooses, whose images it sees, and the rows of a chunk that are executed.

        With a seed chunks are drawn, as in training, by it, the start and the control step.
        """
        self._choose, self._policy, self.chunk_len = choose, policy, chunk_len
        self._seed = seed
        self._vla_memory = VLAMemory(policy.vla)
        self.cameras: tuple[str, ...] = policy.vla.cameras
        self.image_size, self.name = policy.image_size, "policy"
        self.wrap_envs: Callable[[Any], Any] | None = None
        self.identity: dict[str, Any] = {"kind": "student"}
        self.memory, self.batch_size = EpisodeMemory(policy.carried), BATCH_SIZE

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Return the chunks."""
        return self.memory.act(self._forward, observations, infos, self.batch_size)

    def _forward(
        self, observations: dict[str, np.ndarray], infos: list[Info]
    ) -> tuple[np.ndarray, np.ndarray]:
        texts, vla = [info["instruction"] for info in infos], in_episodes(self._vla_memory, infos)
        seen = self._policy.observe(observations, texts, vla)
        seen |= {name: observations[name] for name in self.memory.shapes}
        act = self._choose(seen, texts, *self._keys(infos))
        chunks = np.clip(act.actions[:, : self.chunk_len].cpu().numpy(), -1.0, 1.0)
        memory = getattr(act, "next_memory", None)  # a teacher has none
        if memory is None:
            return chunks, np.zeros((len(chunks), self._policy.memory_size), np.float32)
        return chunks, memory.cpu().numpy()

    def _keys(self, infos: Sequence[Info]) -> list[np.ndarray]:
        if self._seed is None:
            return []
        sequences = [np.random.SeedSequence(episode_key(self._seed, info)) for info in infos]
        return [np.array([sequence.generate_state(2) for sequence in sequences], np.int64)]


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
        history: (control steps, mean success of the student) of every evaluation.
    """

    envs: LiberoVectorEnv
    policy: Policy
    teacher: Teacher
    starts: Sequence[Start]
    every: int
    history: list[tuple[int, float]] = field(default_factory=list)
    _taught: list[Episode] | None = None

    @property
    def best(self) -> float | None:
        """Best mean success so far."""
        return max((score for _, score in self.history), default=None)

    def is_due(self, steps: int) -> bool:
        """Tell whether a threshold has been passed since the last evaluation."""
        return not self.history or steps // self.every > self.history[-1][0] // self.every

    def evaluate(self, steps: int) -> tuple[dict[str, float], bool]:
        """Play the student, and once the teacher.

        Returns:
            Metrics (see docs/on_policy.md), and whether the student is better than ever.
        """
        episodes = self._play(self.policy.act)
        score = mean_success(episodes)
        before = -1.0 if self.best is None else self.best
        self.history.append((steps, score))
        metrics = {
            "eval/success": score,
            "eval/best": max(before, score),
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
        return metrics, score > before

    def _play(self, choose: Choose) -> list[Episode]:
        chunk_len = (self.envs.single_action_space.shape or (0,))[0]
        player = PolicyPlayer(choose, self.policy, chunk_len)
        return list(rollout(self.envs, player, self.starts))

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs, as plain numbers."""
        taught = self._taught
        return {
            "history": [list(pair) for pair in self.history],
            "taught": None if taught is None else sorted([*e.start, e.success] for e in taught),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        self.history = [(int(steps), float(score)) for steps, score in state["history"]]
        if state["taught"] is not None:
            self._taught = [Episode(Start(*s), won, won, not won, 0) for *s, won in state["taught"]]
