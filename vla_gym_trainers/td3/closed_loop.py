"""Greedy evaluation on sampled layouts during training, and the best policy so far."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vla_gym.files import replacing
from vla_gym.rollout import Start
from vla_gym.rollout.episodes import mean_success, success_by_task
from vla_gym_trainers.evaluation.run_player import RunPlayer
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.torch_helpers import save_tensors
from vla_gym_trainers.td3.algorithm import TD3BC
from vla_gym_trainers.td3.finetune import VLAFineTuner
from vla_gym_trainers.td3.policy import RLTokenPolicy


@dataclass
class BestModel:
    """Evaluates at thresholds of collected chunks and keeps the best policy.

    The choice is made on sampled layouts that neither training nor the final evaluation plays, so
    the best of many is not flattered by the states that are reported.

    With ``background`` they are played by a thread, with a copy of the policy, while collecting and
    learning go on; :meth:`poll` then has the result.

    Attributes:
        player: Plays the policies.
        starts: Sampled layouts, the same at every evaluation.
        run: Where ``best.safetensors`` goes.
        every: Chunks between two evaluations.
        background: Play in a thread.
        vla: Mean success of the VLA on the same layouts, once known.
        history: (chunks, mean success, mean success by task) of every evaluation.
    """

    player: RunPlayer
    starts: Sequence[Start]
    run: RunDir
    every: int
    background: bool = False
    vla: float | None = None
    history: list[tuple[int, float, dict[int, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._pending: Future[dict[str, float]] | None = None
        self._tuner: VLAFineTuner | None = None

    @property
    def best(self) -> float | None:
        """Best mean success so far, None before the first evaluation."""
        return max((score for _, score, _ in self.history), default=None)

    def close(self) -> None:
        """Wait for the evaluation under way and end the thread."""
        self._executor.shutdown(wait=True)

    def is_due(self, num_chunks: int) -> bool:
        """Tell whether a threshold has been passed since the last evaluation.

        No modulo: several environments step at once. Not while an evaluation is under way: the
        next one begins after it.
        """
        last = self.history[-1][0] if self.history else 0
        return self._pending is None and num_chunks // self.every > last // self.every

    def begin(self, model: TD3BC, num_chunks: int) -> None:
        """Begin to evaluate the policy as it is now; call it where the model stands still."""
        arguments = (copy.deepcopy(model.policy), num_chunks)
        # Only without a thread: a VLA that is trained collects and learns by turns (ahead 0).
        self._tuner = model.fine_tuner
        if self._tuner is not None:
            self.player.use(self._tuner.vla, self._tuner.encoder)
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

    def _evaluate(self, policy: RLTokenPolicy, num_chunks: int) -> dict[str, float]:
        """Play the policy (and once the VLA) on the layouts; keep it if it is the best."""
        if self.vla is None:
            self.vla = mean_success(self.player.play(None, self.starts))
        episodes = self.player.play(policy, self.starts)
        score, by_task = mean_success(episodes), success_by_task(episodes)
        before = -1.0 if self.best is None else self.best
        self.history.append((num_chunks, score, by_task))
        if score > before:
            if self._tuner is not None:
                with replacing(self.run.best_vla) as draft:
                    save_tensors(draft, self._tuner.state_dict(optimizer=False))
            policy.save(self.run.best)
        metrics = {
            "eval/success": score,
            "eval/best": max(before, score),
            "eval/vla_success": self.vla,
            "eval/chunks": float(num_chunks),
        }
        return metrics | {f"eval/success_task_{task}": rate for task, rate in by_task.items()}

    def state(self) -> dict[str, Any]:
        """Return what the result card holds, and a resumed run needs."""
        return {"best": self.best, "vla": self.vla, "history": self.history}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` returned."""
        self.vla, self.history = state["vla"], list(state["history"])
