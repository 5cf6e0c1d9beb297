"""``vla-gym-train ppo-actor``: PPO on the RL-token actor, in one run directory."""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv

from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers.ppo_actor.algorithm import PPOActor, PPORollout
from vla_gym_trainers.ppo_actor.config import PPOActorConfig
from vla_gym_trainers.ppo_actor.rollout import RolloutCollector
from vla_gym_trainers.runs.closed_loop import BestModel
from vla_gym_trainers.runs.metrics import RunLogger
from vla_gym_trainers.runs.result_card import write_json
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.settings import check_resumable, read_settings
from vla_gym_trainers.runs.stopping import StopRequest, stoppable
from vla_gym_trainers.td3 import train as train_td3
from vla_gym_trainers.td3.algorithm import TD3BC
from vla_gym_trainers.td3.config import TD3Config
from vla_gym_trainers.td3.run_config import RESUMABLE

#: Raised when the content of checkpoints changes.
FORMAT = 1


def train_ppo_actor(config: PPOActorConfig) -> train_td3.TD3Run:
    """Train, evaluate the VLA and the policy on the same official states, write the card.

    Raises:
        ConfigError: If the run directory holds another run's checkpoints.
    """
    run = RunDir(config.run_dir or train_td3.default_run_dir(config))
    if run.checkpoints():
        raise ConfigError(f"{run.path} holds a run already: resume it, or take another --run-dir.")
    return _train(config, run)


def resume_ppo_actor(run_dir: Path, config: PPOActorConfig | None = None) -> train_td3.TD3Run:
    """Go on from the newest checkpoint, bit for bit as the run would have gone on.

    Args:
        run_dir: The run's folder.
        config: Its settings, of which those of ``run_config.RESUMABLE`` may differ.

    Raises:
        ConfigError: If there is no run, or a setting differs that must not.
        WeightsError: If the checkpoint is damaged.
    """
    run = RunDir(run_dir)
    saved = read_settings(run.config, PPOActorConfig)
    if config is not None:
        check_resumable(saved, config, RESUMABLE)
    newest = run.checkpoints()[-1:]
    return _train(config or saved, run, newest[0] if newest else None)


def _train(config: PPOActorConfig, run: RunDir, checkpoint: Path | None = None) -> train_td3.TD3Run:
    torch.set_num_threads(config.torch_threads)
    with run.lock(), stoppable(run, "ppo-actor") as request, ExitStack() as stack:
        write_json(run.config, config)
        env = stack.enter_context(closing(train_td3.make_vec(config)))
        best = train_td3.open_best(config, run, stack)
        loop = PPOLoop(config, run, env, best, request)
        logged = None if checkpoint is None else loop.load(checkpoint)
        logger = RunLogger(run.metrics, run.tensorboard, logged)
        with closing(logger), request.deferred():
            loop.run(logger)
        return train_td3.conclude(config, run, loop.model, loop.summary(), stack)


class PPOLoop:
    """Rollout, update, evaluation, checkpoint; again until the chunks or the minutes are over.

    Attributes:
        model: A :class:`TD3BC` whose actor is trained, so that what is saved loads, evaluates and
            is guarded like any other policy; its critics stay untrained.
        learner: The algorithm.
        num_chunks: Chunks so far.
    """

    def __init__(
        self,
        config: PPOActorConfig,
        run: RunDir,
        env: VecEnv,
        best: BestModel | None,
        request: StopRequest,
    ) -> None:
        """Build everything.

        Args:
            config: Settings.
            run: The run's folder.
            env: Environments that reset in the same step.
            best: Evaluates and keeps the best policy; None for neither.
            request: Ends the run between two rollouts once it is made.
        """
        self.request = request
        self.config, self.run_dir, self.best, self.env = config, run, best, env
        self.model = self._container()
        self.learner = PPOActor(self.model.policy, config.settings(), config.seed)
        self.collector = RolloutCollector(env, self.learner, config.gamma)
        self.num_chunks = self.num_rollouts = 0
        self.episodes: list[bool] = []
        self.recent: deque[bool] = deque(maxlen=100)
        self.next_checkpoint = config.checkpoint_every
        self.seconds_before, self.started = 0.0, time.perf_counter()

    def _container(self) -> TD3BC:
        config = self.config
        numbers = TD3Config(
            buffer_size=1,
            gamma=config.gamma,
            net_arch=config.net_arch,
            residual_scale=config.residual_scale,
            residual_basis=config.residual_basis,
            n_critics=2,
        )
        return TD3BC("RLTokenPolicy", self.env, numbers, seed=config.seed, device=config.device)

    @property
    def seconds(self) -> float:
        """Seconds so far, those before the run was resumed included."""
        return self.seconds_before + time.perf_counter() - self.started

    def run(self, logger: RunLogger) -> None:
        """Train to the end."""
        config = self.config
        if self.num_rollouts == 0:
            self.env.seed(config.seed)
        steps = config.rollout_chunks // self.env.num_envs
        with self._bar() as bar:
            while self.num_chunks < config.total_timesteps and not self._is_over():
                before = self.num_chunks
                rollout = self.collector.collect(steps, self._count)
                for key, value in self._learn(rollout).items():
                    logger.record(key, value)
                self._log_and_evaluate(logger)
                if self.num_chunks >= self.next_checkpoint:
                    self.save(logger)
                bar.update(self.num_chunks - before)
                if self.recent:
                    bar.set_postfix(success=f"{np.mean(self.recent):.2f}")
        self.save(logger)

    def _is_over(self) -> bool:
        limit = self.config.max_minutes
        return self.request.is_made or (limit is not None and self.seconds >= 60 * limit)

    def _bar(self) -> Any:
        from tqdm import tqdm

        config = self.config
        return tqdm(
            total=config.total_timesteps,
            initial=self.num_chunks,
            unit="chunk",
            disable=not config.progress,
        )

    def _count(self, dones: np.ndarray, infos: list[dict[str, Any]]) -> None:
        self.num_chunks += len(dones)
        for i in np.flatnonzero(dones):
            if not infos[i].get("worker_restarted", False):
                self.recent.append(bool(infos[i].get("is_success", False)))
                self.episodes.append(self.recent[-1])

    def _learn(self, rollout: PPORollout) -> dict[str, float]:
        self.num_rollouts += 1
        if self.num_rollouts == 1:
            kept = {key: value[rollout.valid] for key, value in rollout.observations.items()}
            self.model.policy.normalizer.fit(kept["rl_token"], kept["proprio"])
        value_only = self.num_rollouts <= self.config.value_rollouts
        metrics = self.learner.update(rollout, value_only)
        metrics["train/valid"] = float(rollout.valid.float().mean())
        return metrics

    def _log_and_evaluate(self, logger: RunLogger) -> None:
        self.model.num_timesteps = self.num_chunks
        if self.recent:
            logger.record("rollout/success_rate", float(np.mean(self.recent)))
        logger.record("rollout/episodes", len(self.episodes))
        logger.record("time/fps", int(self.num_chunks / max(self.seconds, 1e-9)))
        if self.best is not None and self.best.is_due(self.num_chunks):
            self.best.begin(self.model, self.num_chunks)
            for key, value in self.best.poll(wait=True).items():
                logger.record(key, value)
        logger.dump(self.num_chunks)

    def save(self, logger: RunLogger) -> None:
        """Write a checkpoint; between two rollouts."""
        while self.next_checkpoint <= self.num_chunks:
            self.next_checkpoint += self.config.checkpoint_every
        environments: Any = self.env
        counters = ("num_chunks", "num_rollouts", "episodes", "recent", "next_checkpoint")
        loop = {
            "format": FORMAT,
            "env": environments.get_state(),
            "obs": self.collector.obs,
            "counters": {name: getattr(self, name) for name in counters},
            "seconds": self.seconds,
            "best": None if self.best is None else self.best.state(),
            "logger": logger.state(self.num_chunks),
        }
        with self.run_dir.new_checkpoint(self.num_chunks, self.config.keep_checkpoints) as folder:
            self.model.save(folder / "model.zip")
            with open(folder / "learner.pt", "wb") as file:  # torch's own hides a full disk
                torch.save(self.learner.learner_state(), file)
            with open(folder / "loop.pkl", "wb") as file:
                pickle.dump(loop, file, protocol=pickle.HIGHEST_PROTOCOL)
            write_json(folder / "state.json", {"format": FORMAT, "chunks": self.num_chunks})

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Go on from a checkpoint; its pickle is executed, so load your own runs only.

        Returns:
            The logger's state.

        Raises:
            WeightsError: If a file is missing, damaged or of another format.
        """
        try:
            with open(folder / "loop.pkl", "rb") as file:
                loop = pickle.load(file)
            if loop["format"] != FORMAT:
                raise WeightsError(f"{folder} has format {loop['format']}, expected {FORMAT}.")
            self.model.set_parameters(str(folder / "model.zip"), device=self.config.device)
            state = torch.load(folder / "learner.pt", weights_only=True)
        except (OSError, EOFError, pickle.UnpicklingError, KeyError, RuntimeError) as error:
            raise WeightsError(f"{folder} is no whole checkpoint: {error}") from error
        self.learner.restore(state)
        environments: Any = self.env
        environments.set_state(loop["env"])
        self.collector.obs = loop["obs"]
        for name, value in loop["counters"].items():
            setattr(self, name, value)
        self.seconds_before = loop["seconds"]
        if self.best is not None and loop["best"] is not None:
            self.best.restore(loop["best"])
        logged: Mapping[str, Any] = loop["logger"]
        return logged

    def summary(self) -> dict[str, Any]:
        """Return counts and rates of the training episodes (played with exploration noise)."""
        minutes, episodes = self.seconds / 60, self.episodes
        summary: dict[str, Any] = {
            "chunks": self.num_chunks,
            "rollouts": self.num_rollouts,
            "minutes": round(minutes, 3),
            "chunks_per_second": round(self.num_chunks / max(60 * minutes, 1e-9), 2),
            "episodes": len(episodes),
            "success_by_100_episodes": [
                float(np.mean(episodes[i : i + 100])) for i in range(0, len(episodes), 100)
            ],
        }
        if self.best is not None:
            summary["closed_loop"] = self.best.state()
        return summary
