"""The loop of a run: collect, learn, evaluate, save."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np

from vla_gym_trainers.on_policy.checkpoint import (
    load_checkpoint,
    load_parameters,
    parameter_bytes,
    save_checkpoint,
)
from vla_gym_trainers.on_policy.config import GRPOConfig, OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import World
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.parts import Parts
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.progress import Progress
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.source import Order, RolloutSource
from vla_gym_trainers.on_policy.targets import Targets, grpo_targets, ppo_targets, rollout_metrics
from vla_gym_trainers.on_policy.validation import Validation
from vla_gym_trainers.runs.closed_loop import EVAL_SEED
from vla_gym_trainers.runs.metrics import RunLogger
from vla_gym_trainers.runs.run_dir import RunDir, replacing
from vla_gym_trainers.runs.stopping import StopRequest
from vla_gym_trainers.runs.torch_threads import torch_threads

_COLLECTION = 8  # sets the seeds of rollouts apart from other uses of the run's seed
BEST, LAST = "best.safetensors", "last.safetensors"


def rollout_seed(seed: int, iteration: int) -> int:
    """Return the seed of a rollout's layouts and draws, below those of evaluations."""
    state = np.random.SeedSequence([seed, _COLLECTION, iteration]).generate_state(1, np.uint64)
    return int(state[0] % EVAL_SEED)


def targets_of(config: OnPolicyConfig, rollout: Rollout, world: World) -> Targets:
    """Return advantages and returns as the algorithm defines them."""
    if isinstance(config, PPOConfig):
        return ppo_targets(rollout, config.gae_lambda, world, standardize=config.standardize)
    assert isinstance(config, GRPOConfig)
    return grpo_targets(
        rollout,
        config.advantage,
        world,
        baseline=config.baseline,
        aggregation=config.aggregation,
    )


class Loop:
    """Runs from wherever it stands to the end; see :meth:`run`.

    A rollout is collected in the phase that is due when it begins. With an asynchronous source the
    next one begins before this one is learnt from; not if a checkpoint is due, so that nothing is
    under way when it is written. After a checkpoint all environments begin new episodes. So a
    resumed run equals one that was never stopped.
    """

    def __init__(
        self,
        config: OnPolicyConfig,
        parts: Parts,
        source: RolloutSource,
        learner: Learner,
        *,
        world: World,
        run: RunDir,
        logger: RunLogger | None,
        validation: Validation | None,
        request: StopRequest,
    ) -> None:
        """Put a run together; process 0 alone has a logger and a validation.

        A ``request`` made in any process ends all of them after the same rollout.
        """
        self.config, self.parts, self.source, self.learner = config, parts, source, learner
        self.world, self.directory, self.logger = world, run, logger
        self.validation, self.request = validation, request
        self.schedule = config.schedule()
        is_first = world.rank == 0
        self.progress = Progress(
            config.total_steps, config.progress and is_first, config.checkpoint_every
        )
        self._pending_phase: Phase | None = None

    def run(self) -> None:
        """Train to the end; a checkpoint is written there too."""
        progress = self.progress
        try:
            while self._pending_phase is not None or not self._is_over():
                self._validate()
                self._iterate()
            if not self.request.is_made:
                self._validate(last=True)
            if self.world.rank == 0 and progress.iteration:
                self.save()
        finally:
            progress.close()

    def _is_over(self) -> bool:
        """Tell whether nothing more is to be collected; the same in all processes."""
        limit = self.config.max_minutes
        late = limit is not None and self.progress.seconds >= 60.0 * limit
        # Process 0's clock decides; any process may be asked to stop.
        ends = [late and self.world.rank == 0, self.request.is_made]
        is_late, is_stopped = (self.world.sum([float(end) for end in ends]) > 0.0).tolist()
        self.request.is_made = self.request.is_made or is_stopped
        return self.progress.steps >= self.config.total_steps or is_late or is_stopped

    def _iterate(self) -> None:
        progress, began = self.progress, time.perf_counter()
        if self._pending_phase is not None:
            phase, rollout = self._pending_phase, self.source.take()
            self._pending_phase = None
        else:
            phase = self.schedule.at(progress.steps)
            rollout = self.source.collect(self._order(phase, progress.iteration))
        waited = time.perf_counter() - began
        self._enter(phase)
        metrics = rollout_metrics(rollout, progress.iteration, self.world)
        progress.count_staleness(rollout)
        weights = phase.weights
        if weights.learning_rate is None:
            rate = self.config.learning_rate_at(progress.steps)
            weights = replace(weights, learning_rate=rate)
        progress.steps += int(metrics["rollout/env_steps"])
        checkpoint_due = progress.steps >= progress.next_checkpoint
        if self.source.is_asynchronous and not checkpoint_due and not self._is_over():
            self._pending_phase = self.schedule.at(progress.steps)
            self.source.start(self._order(self._pending_phase, progress.iteration + 1))
        began_learning = time.perf_counter()
        targets = targets_of(self.config, rollout, self.world)
        metrics |= targets.metrics
        alone = self._pending_phase is None
        with torch_threads(self.config.learn_threads if alone else self.config.torch_threads):
            metrics |= self.learner.update(
                rollout, targets.advantages, targets.keep, targets.returns, weights
            )
        progress.iteration += 1
        metrics |= {
            "train/learning_rate": weights.learning_rate or 0.0,
            "train/skipped_total": float(self.learner.skipped),
            "phase/epsilon": phase.epsilon,
            "phase/cloning": phase.weights.cloning,
            "time/wait": waited,
            "time/rollout": rollout.seconds["rollout"],
            "time/forward": rollout.seconds["forward"],
            "time/learn": time.perf_counter() - began_learning,
            "time/seconds": progress.seconds,
        }
        progress.update(metrics)
        self._log(metrics)
        if checkpoint_due:
            self.source.restart()
            if self.world.rank == 0:
                self.save()
        while progress.next_checkpoint <= progress.steps:
            progress.next_checkpoint += self.config.checkpoint_every

    def _order(self, phase: Phase, iteration: int) -> Order:
        # The version is that of the parameters at this moment: the updates done so far.
        seed = rollout_seed(self.config.seed, iteration)
        make_actor = self.parts.actor(self.config, phase)
        return Order(seed, self.progress.iteration, make_actor)

    def _enter(self, phase: Phase) -> None:
        """The reference of RL is what the student was when its warm-up was over."""
        changed = self.progress.phase == "warmup" != phase.name
        if changed and self.parts.reference is not None:
            self.parts.reference.follow(self.parts.policy)
        self.progress.phase = phase.name

    def _validate(self, last: bool = False) -> None:
        validation, steps = self.validation, self.progress.steps
        if validation is None:
            return
        seen = bool(validation.history) and validation.history[-1][0] == steps
        if not (validation.is_due(steps) or last) or seen:
            return
        metrics, is_best = validation.evaluate(steps)
        self._log(metrics)
        if is_best:
            self._write(BEST)

    def _write(self, name: str) -> None:
        with replacing(self.directory.path / name) as file:
            file.write(parameter_bytes(self.parts.policy.state_dict()))

    def _log(self, metrics: dict[str, float]) -> None:
        if self.logger is None:
            return
        for key, value in metrics.items():
            self.logger.record(key, value)
        self.logger.dump(self.progress.steps)

    # Checkpoints

    def save(self) -> None:
        """Write a checkpoint; no rollout may be under way."""
        assert not self.source.is_pending and self.logger is not None
        progress = self.progress
        saved = progress.state()
        while saved["next_checkpoint"] <= progress.steps:
            saved["next_checkpoint"] += self.config.checkpoint_every
        state = {
            "progress": saved,
            "logger": self.logger.state(progress.steps),
            "validation": None if self.validation is None else self.validation.state(),
        }
        keep = self.config.keep_checkpoints
        with self.directory.new_checkpoint(progress.steps, keep) as folder:
            save_checkpoint(folder, self.learner, self.parts.reference, state)

    def finish(self) -> None:
        """Write the last parameters, and take over the best ones if there are any."""
        if self.world.rank == 0:
            self._write(LAST)
            best = self.directory.path / BEST
            if best.is_file():
                self.parts.policy.load_state_dict(load_parameters(best))
            self.parts.save(self.directory.path)

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what the run itself keeps (the logger's is restored where it is made)."""
        self.progress.restore(state["progress"])
        if self.validation is not None and state["validation"] is not None:
            self.validation.restore(state["validation"])


def restored(run: RunDir, learner: Learner, parts: Parts) -> dict[str, Any] | None:
    """Bring learner and networks to the newest checkpoint, if there is one; return its state."""
    newest = run.checkpoints()[-1:]
    return load_checkpoint(newest[0], learner, parts.reference) if newest else None
