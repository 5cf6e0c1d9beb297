"""TD3+BC on RL tokens, as a stable-baselines3 algorithm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any

import numpy as np
import torch
from gymnasium.vector import VectorEnv
from stable_baselines3 import TD3
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.rollout.chunks import own
from vla_gym_trainers.rollout.collector import Stopwatch
from vla_gym_trainers.rollout.pipeline import Pipeline
from vla_gym_trainers.runs.sb3_vec_env import deferred_reset, sb3_vec_env
from vla_gym_trainers.td3.acting import DEADLINE_S, ActingPolicy, Block, ChunkPlayer
from vla_gym_trainers.td3.algorithm_config import TD3Config
from vla_gym_trainers.td3.episode_log import counts
from vla_gym_trainers.td3.exploration import ChunkNoise
from vla_gym_trainers.td3.finetune import VLAFineTuner
from vla_gym_trainers.td3.policy import RLTokenPolicy, check_spaces, num_tasks
from vla_gym_trainers.td3.replay import ChunkReplayBuffer
from vla_gym_trainers.td3.task_sampler import TaskSampler
from vla_gym_trainers.td3.updates import GradientSteps


class TD3BC(TD3):
    """Twin-delayed DDPG whose actor corrects a frozen VLA (RL Token, arXiv 2604.23073).

    Observation: Dict(rl_token (D,), vla_action (C, N), proprio (P,), ...); action: a whole chunk,
    Box(-1, 1, (C, N)). One timestep is one chunk.

    1. Warm-up: the first ``learning_starts`` chunks play the VLA's own action plus noise.
    2. The input normaliser is fitted to them, a plain actor cloned to the VLA, and the critics
       alone learn for ``critic_warmup_steps`` gradient steps: no actor follows untrained critics.
    3. Then ``utd_ratio`` critic steps per collected chunk, an actor step every ``policy_delay``.

    See :func:`vla_gym_trainers.td3.losses.td3_target` for the targets. ``ahead`` says how many
    blocks collecting may be ahead of learning, see :class:`.Pipeline`; ``utd_ratio`` always holds.

    With ``vla_update_freq`` the VLA is trained too, see :mod:`vla_gym_trainers.td3.finetune`.

    Attributes:
        config: The numbers.
        fine_tuner: Trains the VLA; None while it stays frozen, and without environments.
        max_staleness: Most updates so far that the actor of a block was behind the learner.
    """

    policy_aliases = {"RLTokenPolicy": RLTokenPolicy}
    policy: RLTokenPolicy  # type: ignore[assignment]
    replay_buffer: ChunkReplayBuffer

    def __init__(
        self,
        policy: str | type[RLTokenPolicy],
        env: GymEnv | VectorEnv[Any, Any, Any] | str | None,
        config: TD3Config | None = None,
        *,
        device: torch.device | str = "cpu",
        rollout_device: torch.device | str | None = None,
        **sb3: Any,
    ) -> None:
        """Create the algorithm.

        Args:
            policy: ``"RLTokenPolicy"`` or a subclass of it.
            env: With the spaces above: a vector environment of Gymnasium that resets in the same
                step (``LiberoVLA-*``), a VecEnv of SB3, or a single environment.
            config: All numbers; None for the defaults.
            device: Torch device of the learner.
            rollout_device: Torch device of the actor that collects; None for ``device``.
            **sb3: As in SB3's TD3: ``seed`` (of networks, noise, replay sampling and environments),
                ``tensorboard_log``, ``stats_window_size``, ``verbose``.

        Raises:
            ConfigError: If the spaces, the policy or the config do not fit, or a number of the
                config is given here.
        """
        if isinstance(policy, str) and policy not in self.policy_aliases:
            raise ConfigError(f"policy must be 'RLTokenPolicy' or a class, got {policy!r}.")
        self.config = config = TD3Config.checked(config, sb3)
        self.rollout_device = rollout_device
        self.update_debt, self.vla_debt, self.max_staleness = 0.0, 0, 0
        self.pipeline: Pipeline[ActingPolicy, Block] | None = None
        #: What the pipeline had collected when ``learn`` ended; it is handed out first by the next.
        self.pipeline_state: dict[str, Any] | None = None
        self._critics_are_warm = False
        self._steps: tuple[Any, GradientSteps] | None = None
        self._rng_state: np.ndarray | None = None
        self.exploration: ChunkNoise | None = None
        self.task_sampler: TaskSampler | None = None
        self.clock = Stopwatch()
        super().__init__(
            policy,  # type: ignore[arg-type]
            env,  # type: ignore[arg-type]
            config.learning_rate,
            config.buffer_size,
            config.learning_starts,
            config.batch_size,
            config.tau,
            config.gamma,
            config.train_freq,
            gradient_steps=-1,
            replay_buffer_class=ChunkReplayBuffer,
            policy_kwargs={"config": config},
            device=device,
            **sb3,
        )

    @staticmethod
    def _wrap_env(env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        """Adapt what the constructor, ``load`` and ``set_env`` are given."""
        if isinstance(env, VectorEnv):
            env = sb3_vec_env(env)
        return TD3._wrap_env(env, verbose, monitor_wrapper)

    def _setup_model(self) -> None:
        chunk_len, action_size = check_spaces(self.observation_space, self.action_space)
        config = self.config
        replay = {"gamma": config.gamma, "seed": self.seed, "balanced": config.balanced_replay}
        self.replay_buffer_kwargs = replay
        super()._setup_model()
        self._rng = torch.Generator(self.device)
        self._rng.manual_seed(self.seed if self.seed is not None else torch.seed() % 2**31)
        size = len(self._rng.get_state())  # a GPU's generator has another state than a CPU's
        if self._rng_state is not None and len(self._rng_state) == size:
            self._rng.set_state(torch.from_numpy(self._rng_state))  # goes on where it was saved
        if self.exploration is None:
            sizes = (config.noise_white, config.noise_chunk, config.scale_of(action_size))
            self.exploration = ChunkNoise(chunk_len, *sizes, self.seed, config.noise_correlation)
        if config.task_sampling == "unsolved" and self.task_sampler is None:
            num_tasks(self.observation_space)  # refuses environments that do not tell
            self.task_sampler = TaskSampler()
        self.fine_tuner: VLAFineTuner | None = None
        if config.vla_update_freq and self.env is not None:
            self.fine_tuner = VLAFineTuner(getattr(self.env, "vector_env", self.env), config)

    def learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 4,
        tb_log_name: str = "TD3BC",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> TD3BC:
        """Collect and learn for ``total_timesteps`` chunks; see SB3's ``learn``.

        Blocks are collected and handed out whole, so a few chunks more may be played; ``on_step``
        is called when a block is handed out, once for each chunk of all environments.
        """
        if reset_num_timesteps or not self._last_obs:  # the environments begin anew
            self.pipeline_state = None
            self.replay_buffer.cut_episodes()
        with deferred_reset(self.env):
            total, callback = self._setup_learn(
                total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
            )
        callback.on_training_start(locals(), globals())
        size = self.config.train_freq * self.n_envs  # of a block
        with self._collecting(-(-(total - self.num_timesteps) // size)) as pipeline:
            while self.num_timesteps < total:
                callback.on_rollout_start()
                with self.clock("wait") if self.config.ahead else nullcontext():
                    block, staleness = pipeline.next()
                if not self._store(block, staleness, callback, log_interval):
                    break
                callback.on_rollout_end()
                begun = self.num_timesteps > self.config.learning_starts
                if begun and self.replay_buffer.size():  # workers may have lost all that was played
                    self.train(size, self.config.batch_size)
                    self._train_vla(size)
                pipeline.publish()
        callback.on_training_end()
        return self

    def train(self, gradient_steps: int, batch_size: int = 256) -> None:
        """Do ``utd_ratio`` critic steps for each new chunk (fractions are carried over).

        Chunks are ``gradient_steps``, as SB3 counts them; ``batch_size`` is in transitions.
        """
        self._update_learning_rate([self.policy.actor_optimizer, self.policy.critic_optimizer])
        metrics: defaultdict[str, list[Tensor]] = defaultdict(list)
        config = self.config.at(self.num_timesteps)
        steps, self.update_debt = divmod(self.update_debt + gradient_steps * config.utd_ratio, 1.0)
        if self.task_sampler is not None:
            self.replay_buffer.task_weights = self.task_sampler.weights()
        gradient = self._gradient_steps(batch_size)
        with self.clock("learn"):
            if not self._critics_are_warm:
                gradient.warm_up(self.replay_buffer, batch_size)
                self._critics_are_warm = True
            for _ in range(int(steps)):
                self._n_updates += 1
                if self.fine_tuner is None:
                    batch = self.replay_buffer.sample(batch_size)
                else:
                    batch, stale = self.fine_tuner.sample(self.replay_buffer, batch_size)
                    metrics["vla_stale"].append(torch.tensor(stale))
                values = gradient.critic(batch)
                if self._n_updates % config.policy_delay == 0:
                    values |= gradient.actor(batch, config.bc_weight)
                for name, value in values.items():
                    metrics[name].append(value)
            for name, numbers in metrics.items():
                self.logger.record(f"train/{name}", torch.stack(numbers).mean().item())
        if metrics:
            self.logger.record("train/bc_weight", config.bc_weight)
            self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
            self.logger.record("train/replay_size", self.replay_buffer.size())

    def _gradient_steps(self, batch_size: int) -> GradientSteps:
        """Return the steps, made anew where something has changed that a CUDA graph would not."""
        optimizers = self.policy.actor_optimizer, self.policy.critic_optimizer
        rates = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        made_of = self.policy, self._rng, copy(self.config), rates, batch_size
        if self._steps is None or self._steps[0] != made_of:
            use_graphs = self.device.type == "cuda" and self.fine_tuner is None
            self._steps = made_of, GradientSteps(self.policy, self.config, self._rng, use_graphs)
        return self._steps[1]

    def _train_vla(self, chunks: int) -> None:
        """Do the VLA's gradient steps that are due after so many more chunks."""
        if self.fine_tuner is None:
            return
        self.fine_tuner.config = self.config.at(self.num_timesteps)
        steps, self.vla_debt = divmod(self.vla_debt + chunks, self.config.vla_update_freq)
        with self.clock("learn"):
            for _ in range(steps):
                metrics = self.fine_tuner.step(self.policy, self.replay_buffer, self._rng)
                for name, value in metrics.items():
                    self.logger.record_mean(f"train/{name}", value)
            if steps and isinstance(self._last_obs, dict):
                self.fine_tuner.refresh_observation(self._last_obs)
        self.logger.record("train/vla_version", self.fine_tuner.version)

    @contextmanager
    def _collecting(self, num_blocks: int) -> Iterator[Pipeline[ActingPolicy, Block]]:
        """Make the pipeline; what it has collected at the end is kept for the next ``learn``."""
        assert self.env is not None and self.exploration is not None
        state, config = self.pipeline_state, self.config
        waiting = 0 if state is None else len(state["ready"])
        begun = self.num_timesteps + waiting * config.train_freq * self.n_envs
        obs = self._last_obs = own(self._last_obs)  # which the player keeps up to date
        player = ChunkPlayer(self.env, obs, self.exploration, self.clock, config, begun)
        pipeline = self.pipeline = Pipeline(
            player.collect,
            self._newest,
            ahead=config.ahead,
            deadline=DEADLINE_S,
            limit=num_blocks,
            state=state,
        )
        try:
            with pipeline:
                yield pipeline
        finally:
            self.pipeline_state, self.pipeline = pipeline.state(), None

    def _newest(self) -> ActingPolicy:
        """Return what acts in the next block."""
        tasks = None if self.task_sampler is None else self.task_sampler.weights()
        device = self.rollout_device or self.device
        return ActingPolicy(self.policy, device, self._critics_are_warm, tasks)

    def _store(
        self, block: Block, staleness: int, callback: BaseCallback, log_interval: int | None
    ) -> bool:
        """Put a block into the replay; return whether the callback wants to go on."""
        go_on = True
        self.max_staleness = max(self.max_staleness, staleness)
        for step in block:
            self.num_timesteps += self.n_envs
            callback.update_locals({**vars(step), "self": self})
            go_on &= callback.on_step()
            whole = [i for i, info in enumerate(step.infos) if counts(info)]
            self._update_info_buffer([step.infos[i] for i in whole], step.dones[whole])
            if self.task_sampler is not None:
                self.task_sampler.add(step.obs["task_id"], step.dones, step.infos)
            for info in step.infos:
                self.config.check_gamma(info)
            row = (step.obs, step.next_obs, step.actions, step.rewards, step.dones, step.infos)
            self.replay_buffer.add(*row)
            self._update_current_progress_remaining(self.num_timesteps, self._total_timesteps)
            if self.config.ahead > 1:
                self.logger.record_mean("async/staleness", staleness)
                self.logger.record("async/staleness_max", self.max_staleness)
            for _ in np.flatnonzero(step.dones):
                self._episode_num += 1
                if log_interval and self._episode_num % log_interval == 0:
                    self.dump_logs()
        return go_on

    def dump_logs(self) -> None:
        """Write what was recorded, and the seconds that each part took since the last time."""
        for part, seconds in self.clock.lap().items():
            self.logger.record(f"time/{part}", seconds)
        self.logger.record("rollout/success_episodes", len(self.ep_success_buffer or ()))
        super().dump_logs()

    def set_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Load networks and optimisers; see SB3's ``set_parameters``."""
        self._steps = None  # a CUDA graph would write to the optimisers' old state
        super().set_parameters(*args, **kwargs)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save networks, optimisers and generators to a zip file (replay: save_replay_buffer)."""
        self._rng_state = self._rng.get_state().cpu().numpy()
        super().save(*args, **kwargs)

    def _excluded_save_params(self) -> list[str]:
        own = "_rng _steps clock pipeline pipeline_state fine_tuner"
        return [*super()._excluded_save_params(), *own.split()]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "policy.actor_optimizer", "policy.critic_optimizer"], []
