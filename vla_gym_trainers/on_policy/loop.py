"""The loop of a run: collect, learn, evaluate, save."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vla_gym.rollout import Start
from vla_gym.rollout.episodes import sampled_starts
from vla_gym.rollout.film import record_video
from vla_gym.suites import get_suite
from vla_gym_trainers.on_policy.collector import RolloutCollector
from vla_gym_trainers.on_policy.config import GRPOConfig, OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.networks import EnvFactories, libero_envs, make_networks
from vla_gym_trainers.on_policy.phases import Phase, phase_at
from vla_gym_trainers.on_policy.policy import Policy
from vla_gym_trainers.on_policy.progress import Progress
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.targets import Targets, grpo_targets, ppo_targets, rollout_metrics
from vla_gym_trainers.on_policy.validation import PolicyPlayer, Validation
from vla_gym_trainers.rollout.pipeline import Pipeline
from vla_gym_trainers.runs.run import Run
from vla_gym_trainers.runs.settings import EVAL_SEED
from vla_gym_trainers.runs.torch_helpers import load_parameters, save_parameters, torch_threads

DEADLINE_SECONDS = 6 * 3600.0  # of one rollout
_COLLECTION = 8  # sets the seeds of rollouts apart from other uses of the run's seed


def rollout_seed(seed: int, iteration: int) -> int:
    """Return the seed of a rollout's layouts and draws, below those of evaluations."""
    state = np.random.SeedSequence([seed, _COLLECTION, iteration]).generate_state(1, np.uint64)
    # As a float, as the runs in results/ were seeded: numpy 1 divided so by itself.
    return int(float(state[0]) % EVAL_SEED)


def targets_of(config: OnPolicyConfig, rollout: Rollout, group: ProcessGroup) -> Targets:
    """Return advantages and returns as the algorithm defines them."""
    if isinstance(config, PPOConfig):
        return ppo_targets(rollout, config.gae_lambda, group)
    assert isinstance(config, GRPOConfig)
    return grpo_targets(rollout, group, baseline=config.baseline, aggregation=config.aggregation)


RolloutPipeline = Pipeline[tuple[Phase, dict[str, Tensor] | None], tuple[Phase, Rollout]]


class Loop:
    """Trains from wherever a run stands to its end; see :meth:`train`.

    A rollout is collected in the phase that is due when it begins. With ``ahead`` the next ones
    begin before this one is learnt from; not if a checkpoint is due, so that nothing is under way
    when it is written. After a checkpoint all environments begin new episodes. So with ``ahead`` 0
    or 1 a resumed run equals one that was never stopped.
    """

    def __init__(
        self,
        config: OnPolicyConfig,
        run: Run,
        group: ProcessGroup,
        stack: ExitStack,
        *,
        vla: Any = None,
        envs: EnvFactories | None = None,
    ) -> None:
        """Make networks and environments; go on from the run's checkpoint, if it has one.

        A request to stop that any process gets ends all of them after the same rollout.

        ``stack`` closes the environments; for ``vla`` and ``envs`` see :func:`.train.train`.
        """
        self.config, self.run, self.group, self.is_libero = config, run, group, envs is None
        self.networks = make_networks(config, vla)
        policy, teacher = self.policy, self.networks.teacher
        self.learner = Learner(policy, config, group=group)
        self._envs = envs or libero_envs(config, self.networks)
        train_envs = stack.enter_context(closing(self._envs.train()))
        self.train_envs = self.networks.watched(train_envs, config.reward_weights())
        self.collector = RolloutCollector(self.train_envs, groups=config.groups)
        # What acts and what is written must not be what is learnt and what is read.
        self._acting = policy.copy() if config.ahead else policy
        self._buffers = [self._new_buffer() for _ in range(config.ahead + 1)]
        self.validation: Validation | None = None
        if run.is_main and config.eval_every:  # process 0 alone has one
            # Not paid for anything: there only the task counts.
            eval_envs = self.networks.watched(stack.enter_context(closing(self._envs.evaluation())))
            starts = self._starts(config.eval_layouts)
            self.validation = Validation(eval_envs, policy, teacher, starts, config.eval_every)
        self.progress = Progress()
        if run.checkpoint is not None:
            self.learner.restore(run.checkpoint.folder)
            self.progress = Progress(**run.checkpoint.state["progress"])
            if self.validation is not None and run.checkpoint.state["validation"] is not None:
                self.validation.restore(run.checkpoint.state["validation"])

    @property
    def policy(self) -> Policy:
        """The student."""
        return self.networks.policy

    def _new_buffer(self) -> Rollout:
        config, chunks = self.config, self.config.rollout_chunks
        if config.episodes_per_env is not None:
            chunks = math.ceil(self._envs.max_control_steps / self.collector.chunk_len)
        config.check_rows(chunks)
        return Rollout(
            self.policy,
            config.num_envs,
            chunks,
            config.episodes_per_env,
            group_size=config.group_size,
            first_env=self.group.rank * config.num_envs,
        )

    def _starts(self, layouts: int) -> list[Start]:
        suite, seed = get_suite(self.config.suite).name, EVAL_SEED + self.config.seed
        return sampled_starts(suite, self._envs.tasks, layouts, seed)

    def _film(self, path: Path) -> None:
        """Film the policy, greedy, on a sampled layout of each task."""
        config = self.config
        player = PolicyPlayer(self.policy.act, self.policy, self.networks.chunk_len)
        player.name, player.wrap_envs = config.algorithm.upper(), self.networks.watched
        player.cameras = tuple(get_suite(config.suite).cameras)  # a world model may see more
        record_video(path, player, self._starts(1), **config.own_look())

    def train(self) -> None:
        """Train to the end; a checkpoint is written there too."""
        progress = self.progress
        start = {"version": 0, "index": progress.iteration, "ready": [], "weights": None}
        with Pipeline(
            self._collect,
            self._snapshot,
            ahead=self.config.ahead,
            deadline=DEADLINE_SECONDS,
            state=start,
        ) as pipeline:
            while pipeline.num_waiting or not self._is_over():
                self._validate()
                self._iterate(pipeline)
        if not self.run.stop.is_made:
            self._validate(last=True)
        if progress.iteration:
            self.save()

    def _is_over(self) -> bool:
        """Tell whether nothing more is to be collected; the same in all processes."""
        # Process 0's clock decides; any process may be asked to stop.
        stop = self.run.stop
        ends = [self.run.is_late and self.group.rank == 0, stop.is_made]
        is_late, is_stopped = (self.group.sum([float(end) for end in ends]) > 0.0).tolist()
        stop.is_made = stop.is_made or is_stopped
        return self.progress.steps >= self.config.total_steps or is_late or is_stopped

    def _iterate(self, pipeline: RolloutPipeline) -> None:
        """Collect, advantages, update."""
        progress, config = self.progress, self.config
        began = time.perf_counter()
        (phase, rollout), staleness = pipeline.next(begin=False)
        waited = time.perf_counter() - began
        self._enter(phase, rollout)
        metrics = rollout_metrics(rollout, self.group, self._envs.tasks)
        progress.count(metrics, staleness)
        progress.iteration += 1
        if not self.run.is_checkpoint_due(progress.steps) and not self._is_over():
            pipeline.begin()
        began = time.perf_counter()
        targets = targets_of(config, rollout, self.group)
        with torch_threads(config.torch_threads if pipeline.num_waiting else config.learn_threads):
            metrics |= targets.metrics | self.learner.update(
                rollout, targets.advantages, targets.keep, targets.returns, phase
            )
            metrics |= self.after_update(rollout)
        pipeline.publish()
        metrics |= {
            "rollout/staleness": float(staleness),
            "train/skipped_total": float(self.learner.skipped),
            "phase/epsilon": phase.epsilon,
            "phase/cloning": phase.cloning,
            "time/wait": waited,
            "time/rollout": rollout.seconds["rollout"],
            "time/forward": rollout.seconds["forward"],
            "time/learn": time.perf_counter() - began,
            "time/seconds": self.run.seconds,
        }
        self.run.show(progress.steps, metrics.get("rollout/success"), phase.name)
        self.run.log(metrics, progress.steps)
        if self.is_libero:
            self.run.film_if_due(progress.episodes, self._film)
        if self.run.is_checkpoint_due(progress.steps) and not pipeline.num_waiting:
            self.collector.restart()
            self.save()

    def after_update(self, rollout: Rollout) -> dict[str, float]:  # noqa: ARG002
        """Do what else belongs to an iteration; return its metrics."""
        return {}

    def _snapshot(self) -> tuple[Phase, dict[str, Tensor] | None]:
        """Return the phase and the parameters of the next rollout; None for those of now."""
        phase = phase_at(self.config, self.progress.steps)
        return phase, self.policy.state_dict() if self.config.ahead else None

    def _collect(
        self, weights: tuple[Phase, dict[str, Tensor] | None], index: int
    ) -> tuple[Phase, Rollout]:
        """Collect a rollout; with ``ahead``, in the collector's thread."""
        phase, parameters = weights
        if parameters is not None:
            self._acting.load_state_dict(parameters)
        self._acting.noise_share = phase.noise_share
        actor = self.networks.actor(self._acting, self.config, phase)
        out = self._buffers[index % len(self._buffers)]
        return phase, self.collector.collect(actor, out, seed=rollout_seed(self.config.seed, index))

    def _enter(self, phase: Phase, rollout: Rollout) -> None:
        reference, progress = self.learner.reference, self.progress
        if progress.iteration == 0:
            self.policy.begin(rollout.data, self.group)
        # The reference of RL is what the student was when its warm-up was over.
        if progress.phase == "warmup" != phase.name and reference is not None:
            reference.load_state_dict(self.policy.state_dict())
        progress.phase = phase.name
        for policy in filter(None, (self.policy, reference)):
            policy.noise_share = phase.noise_share

    def _validate(self, last: bool = False) -> None:
        validation, steps = self.validation, self.progress.steps
        if validation is None:
            return
        seen = bool(validation.history) and validation.history[-1][0] == steps
        if not (validation.is_due(steps) or last) or seen:
            return
        metrics, is_best = validation.evaluate(steps)
        self.run.log(metrics, steps)
        if is_best:
            save_parameters(self.run.dir.best, self.policy.state_dict())

    # Checkpoints

    def save(self) -> None:
        """Write a checkpoint in process 0; no rollout may be under way."""
        steps = self.progress.steps
        if not self.run.is_main:
            self.run.plan_checkpoint(steps)
            return
        validation = None if self.validation is None else self.validation.state()
        state = {"progress": self.progress, "validation": validation}
        with self.run.new_checkpoint(steps, state) as folder:
            self.write(folder)

    def write(self, folder: Path) -> None:
        """Write the files of a checkpoint."""
        self.learner.save(folder)

    def finish(self) -> None:
        """Write the last parameters, and take over the best ones if there are any."""
        if self.run.is_main:
            files = self.run.dir
            save_parameters(files.last, self.policy.state_dict())
            if files.best.is_file():
                self.policy.load_state_dict(load_parameters(files.best))
            self.networks.save(files.path)

    def results(self) -> dict[str, Any]:
        """Return what else goes into the result card, when the environments are closed."""
        return {}
