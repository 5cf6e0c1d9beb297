"""TD3+BC on RL tokens, as a stable-baselines3 algorithm."""

from __future__ import annotations

import io
import pathlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import TD3
from stable_baselines3.common.noise import ActionNoise
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, Schedule

from vla_gym.errors import ConfigError
from vla_gym_trainers.runs.stopwatch import Stopwatch
from vla_gym_trainers.td3.acting import ActingPolicy, Weights
from vla_gym_trainers.td3.async_learning import AsyncLoop
from vla_gym_trainers.td3.background_updates import BackgroundUpdates
from vla_gym_trainers.td3.buffers import ChunkReplayBuffer
from vla_gym_trainers.td3.exploration import ChunkNoise
from vla_gym_trainers.td3.policy import RLTokenPolicy, check_spaces, uses_bf16
from vla_gym_trainers.td3.stride_replay import StrideReplayBuffer
from vla_gym_trainers.td3.updates import (
    UpdateSettings,
    check_ranges,
    critic_step,
    fit_normalizer,
    td3_steps,
)


class TD3BC(TD3):
    """Twin-delayed DDPG whose actor corrects a frozen VLA (RL Token, arXiv 2604.23073).

    Observation: Dict(rl_token (D,), vla_action (C, 7), proprio (P,), ...); action: a whole chunk,
    Box(-1, 1, (C, 7)). One timestep is one chunk.

    1. Warm-up: the first ``learning_starts`` chunks play the VLA's own action plus noise.
    2. The input normaliser is fitted to them, and the critics alone learn for
       ``critic_warmup_steps`` gradient steps: the actor never follows an untrained critic.
    3. Then ``utd_ratio`` critic steps per collected chunk, an actor step every ``policy_delay``.

    Targets use ``gamma ** executed_steps`` of each transition, stop at success only, and are
    clamped to ``value_range``; see :func:`vla_gym_trainers.td3.losses.td3_target`.

    With ``pipelined=True`` gradient steps run in a background thread on the transitions gathered so
    far while the environment collects the next ones with the actor as it was: the actor that
    collects is one round old, nothing else changes, and the result does not depend on timing.

    With ``asynchronous=True`` a thread collects all the time with the newest weights handed over,
    at most ``max_ahead`` chunks ahead of the learner, see :class:`AsyncLoop`. ``utd_ratio`` holds
    as ever, but what is learned depends on timing.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {"RLTokenPolicy": RLTokenPolicy}
    policy: RLTokenPolicy  # type: ignore[assignment]
    replay_buffer: ChunkReplayBuffer

    def __init__(
        self,
        policy: str | type[RLTokenPolicy],
        env: GymEnv | str,
        learning_rate: float | Schedule = 3e-4,
        buffer_size: int = 100_000,
        learning_starts: int = 2000,
        batch_size: int = 256,
        tau: float = 0.01,
        gamma: float = 0.995,
        train_freq: int | tuple[int, str] = 8,
        utd_ratio: float = 2.0,
        policy_delay: int = 2,
        target_policy_noise: float = 0.02,
        target_noise_clip: float = 0.05,
        bc_weight: float = 1.0,
        mc_weight: float = 0.25,
        critic_warmup_steps: int = 3000,
        reference_dropout: float = 0.5,
        pessimism: float = 0.0,
        noise_white: float = 0.01,
        noise_chunk: float = 0.06,
        noise_correlation: float = 0.0,
        value_range: tuple[float, float] | None = (0.0, 1.0),
        balanced_replay: bool = False,
        pipelined: bool = False,
        asynchronous: bool = False,
        max_ahead: int = 64,
        rollout_device: torch.device | str | None = None,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "cpu",
        _init_setup_model: bool = True,
    ) -> None:
        """Create the algorithm; arguments not listed here mean what they mean in SB3's TD3.

        Args:
            policy: ``"RLTokenPolicy"`` or a subclass of it.
            env: Environment or VecEnv with the spaces above (see ``LiberoVLA-*``).
            learning_rate: Of actor and critics.
            buffer_size: Replay capacity in transitions: one a chunk, with a stride more.
            learning_starts: Warm-up length in chunks.
            batch_size: Transitions per gradient step.
            tau: Polyak coefficient of both targets, per critic step.
            gamma: Discount per control step; give the environment the same one.
            train_freq: Chunks per environment between two blocks of gradient steps.
            utd_ratio: Critic gradient steps per collected chunk (update-to-data ratio).
            policy_delay: Critic steps per actor step.
            target_policy_noise: Sigma of target smoothing, in units of the action scale.
            target_noise_clip: Its bound, in the same units.
            bc_weight: ``beta``, on the squared scaled distance to the reference, summed over A.
            mc_weight: Share of the Monte-Carlo return in the targets, in [0, 1].
            critic_warmup_steps: Critic-only gradient steps after the warm-up.
            reference_dropout: Probability that the network does not see the reference.
            pessimism: ``kappa``: doubts about leaving the VLA where the critics disagree; see
                :func:`vla_gym_trainers.td3.losses.pessimistic_value`.
            noise_white: Exploration noise per control step, in units of the action scale: the
                largest, each episode draws its own level (see :class:`ChunkNoise`).
            noise_chunk: Exploration offset shared by a chunk, likewise.
            noise_correlation: Of the offsets of successive chunks, in [0, 1].
            value_range: Reachable returns; None disables the clamp of the targets.
            balanced_replay: Sample all tasks alike, see :class:`ChunkReplayBuffer`.
            pipelined: Learn in a background thread while collecting.
            asynchronous: Collect in a background thread while learning.
            max_ahead: Chunks that it may be ahead of the learner.
            rollout_device: Torch device of the actor that collects; None for ``device``.
            stats_window_size: Episodes in ``rollout/success_rate``.
            tensorboard_log: Folder for TensorBoard.
            policy_kwargs: See :class:`RLTokenPolicy`.
            verbose: SB3's verbosity.
            seed: Seed of networks, noise and replay sampling.
            device: Torch device.
            _init_setup_model: SB3's switch used by ``load``.

        Raises:
            ConfigError: If the spaces do not fit or a number is out of range.
        """
        check_ranges(utd_ratio, bc_weight, pessimism, mc_weight, reference_dropout, gamma)
        if pipelined and asynchronous:
            raise ConfigError("pipelined and asynchronous exclude each other: choose one.")
        self.utd_ratio, self.bc_weight, self.mc_weight = utd_ratio, bc_weight, mc_weight
        self.critic_warmup_steps = critic_warmup_steps
        self.reference_dropout, self.pessimism = reference_dropout, pessimism
        self.noise_white, self.noise_chunk = noise_white, noise_chunk
        self.noise_correlation = noise_correlation
        self.value_range, self.pipelined = value_range, pipelined
        #: Tasks in which ``predict`` returns the VLA's chunk; see ``runs.guard``.
        self.guarded_tasks: tuple[int, ...] = ()
        self.asynchronous, self.max_ahead = asynchronous, max_ahead
        self.rollout_device = rollout_device
        self.update_debt = 0.0
        self.loop: AsyncLoop | None = None
        self._critics_are_warm = False
        self._rng_state: np.ndarray | None = None
        self.exploration: ChunkNoise | None = None
        self._background = BackgroundUpdates()
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self.clock, self._acted_at, self._vla_seconds = Stopwatch(), 0.0, 0.0
        super().__init__(
            policy,  # type: ignore[arg-type]
            env,
            learning_rate,
            buffer_size,
            learning_starts,
            batch_size,
            tau,
            gamma,
            train_freq,
            gradient_steps=-1,
            replay_buffer_class=StrideReplayBuffer,
            replay_buffer_kwargs={"gamma": gamma, "seed": seed, "balanced": balanced_replay},
            policy_delay=policy_delay,
            target_policy_noise=target_policy_noise,
            target_noise_clip=target_noise_clip,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            policy_kwargs=policy_kwargs,
            verbose=verbose,
            seed=seed,
            device=device,
            _init_setup_model=_init_setup_model,
        )

    def _setup_model(self) -> None:
        if not isinstance(self.observation_space, spaces.Dict):
            check_spaces(self.observation_space, self.action_space)
        super()._setup_model()
        self._rng = torch.Generator(self.device)
        self._rng.manual_seed(self.seed if self.seed is not None else torch.seed() % 2**31)
        if self._rng_state is not None:  # a loaded model goes on where it was saved
            self._rng.set_state(torch.from_numpy(self._rng_state))
        if self.exploration is None:
            scale = self.policy.settings["action_scale"]
            chunk_len = check_spaces(self.observation_space, self.action_space)
            sizes = (self.noise_white, self.noise_chunk)
            self.exploration = ChunkNoise(
                chunk_len, *sizes, scale, self.seed, self.noise_correlation
            )
        self.acting = ActingPolicy(self.policy, self.rollout_device or self.device)

    # ---------------------------------------------------------------- collecting

    def _sample_action(
        self, learning_starts: int, action_noise: ActionNoise | None = None, n_envs: int = 1
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the noisy chunks to execute, twice (SB3 wants the stored copy apart)."""
        assert isinstance(self._last_obs, dict)
        is_warm_up = self.num_timesteps < learning_starts
        action = self.noisy_action(self._last_obs, is_warm_up, action_noise)
        assert len(action) == n_envs
        return action, action

    def noisy_action(
        self,
        observation: Mapping[str, np.ndarray],
        is_warm_up: bool,
        action_noise: ActionNoise | None = None,
    ) -> np.ndarray:
        """Return the (N, C, 7) chunks to execute: the VLA's or the acting actor's, plus noise."""
        assert self.exploration is not None
        self._acted_at = time.perf_counter()
        if is_warm_up:
            mean = np.asarray(observation["vla_action"], np.float32)
        else:
            mean = self.acting.act(observation)
        noise = self.exploration.sample(len(mean)) if action_noise is None else action_noise()
        return np.clip(mean + noise, -1.0, 1.0).astype(np.float32)

    def end_episodes(self, dones: np.ndarray) -> None:
        """Tell the exploration noise that episodes have ended."""
        # Called once a step, as ``noisy_action`` is: in between, the environments stepped.
        self.clock.add("rollout", time.perf_counter() - self._acted_at)
        assert self.exploration is not None
        for env in np.flatnonzero(dones):
            self.exploration.end_episode(int(env))

    def _store_transition(
        self,
        replay_buffer: Any,
        buffer_action: np.ndarray,
        new_obs: Any,
        reward: np.ndarray,
        dones: np.ndarray,
        infos: list[dict[str, Any]],
    ) -> None:
        target: Any = self._background if self._background.is_busy else replay_buffer
        super()._store_transition(target, buffer_action, new_obs, reward, dones, infos)
        self.end_episodes(dones)

    # ------------------------------------------------------------------ learning

    def train(self, gradient_steps: int, batch_size: int = 256) -> None:
        """Do ``gradient_steps * utd_ratio`` critic steps (fractions are carried over).

        Args:
            gradient_steps: Chunks collected since the last call, as SB3 counts them.
            batch_size: Transitions per gradient step.
        """
        self.finish_updates()
        self.hand_over()
        optimizers: list[torch.optim.Optimizer] = [
            self.policy.actor_optimizer,
            self.policy.critic_optimizer,
        ]
        self._update_learning_rate(optimizers)
        if self.replay_buffer.size() == 0:
            return
        if not self._critics_are_warm:
            self._warm_up(batch_size)
        self.update_debt += gradient_steps * self.utd_ratio
        steps = int(self.update_debt)
        self.update_debt -= steps
        if not self.pipelined:
            self._learn(steps, batch_size)
            self.finish_updates()
            self.hand_over()
            return
        self._background.start(self._learn, steps, batch_size)

    def finish_updates(self) -> None:
        """Wait for the learner thread and log; its errors are raised here.

        The actor that collects stays as it is until the next :meth:`train`.
        """
        if self._background.is_busy:
            with self.clock("wait"):
                self._background.finish()
        for transition in self._background.take_transitions():
            self.replay_buffer.add(*transition)
        for name, values in self._metrics.items():
            self.logger.record(f"train/{name}", float(np.mean(values)))
        if self._metrics:
            self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
            self.logger.record("train/replay_size", self.replay_buffer.size())
        self._metrics.clear()

    def hand_over(self) -> None:
        """Let the actor that collects play the learner's weights."""
        weights = Weights.of(self.policy, self._n_updates)
        if self.loop is None:
            self.acting.take_over(weights)
        else:
            self.loop.collector.publish(weights)

    def dump_logs(self) -> None:
        """Write what was recorded, and the seconds that each part took since the last time."""
        vla_seconds = float(getattr(self.env, "vla_seconds", 0.0))
        self.clock.add("forward", vla_seconds - self._vla_seconds)
        self._vla_seconds = vla_seconds
        for part, seconds in self.clock.lap().items():
            self.logger.record(f"time/{part}", seconds)
        super().dump_logs()

    def at_rest(self) -> AbstractContextManager[None]:
        """Return a context in which environments and replay stand still, for a checkpoint."""
        return nullcontext() if self.loop is None else self.loop.rest()

    def _warm_up(self, batch_size: int) -> None:
        """Fit the normaliser to the warm-up data, then train the critics alone."""
        fit_normalizer(self.policy, self.replay_buffer)
        settings = self._settings()
        with self.clock("learn"):
            for _ in range(self.critic_warmup_steps):
                critic_step(self.policy, self.replay_buffer.sample(batch_size), settings, self._rng)
        self._critics_are_warm = True

    def _learn(self, steps: int, batch_size: int) -> None:
        """Do the gradient steps; runs in the learner thread if pipelined."""
        with self.clock("learn"):
            metrics = td3_steps(
                self.policy,
                self.replay_buffer,
                self._settings(),
                self._rng,
                steps=steps,
                batch_size=batch_size,
                policy_delay=self.policy_delay,
                first_update=self._n_updates,
            )
        self._n_updates += steps
        for name, values in metrics.items():
            self._metrics[name] += values

    def _settings(self) -> UpdateSettings:
        return UpdateSettings(
            tau=self.tau,
            target_policy_noise=self.target_policy_noise,
            target_noise_clip=self.target_noise_clip,
            bc_weight=self.bc_weight,
            mc_weight=self.mc_weight,
            value_range=self.value_range,
            reference_dropout=self.reference_dropout,
            pessimism=self.pessimism,
            bf16=uses_bf16(self.policy.precision, self.device),
        )

    # --------------------------------------------------------- SB3's entry points

    def learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 4,
        tb_log_name: str = "TD3BC",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> TD3BC:
        """Collect and learn for ``total_timesteps`` chunks; see SB3's ``learn``."""
        if self.asynchronous:
            total, callback = self._setup_learn(
                total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar
            )
            callback.on_training_start(locals(), globals())
            AsyncLoop(self, callback, total, log_interval).run()
            callback.on_training_end()
            return self
        try:
            super().learn(
                total_timesteps,
                callback,
                log_interval,
                tb_log_name,
                reset_num_timesteps,
                progress_bar,
            )
        finally:
            self._background.close()
        self.finish_updates()
        return self

    def predict(
        self, observation: Any, *args: Any, **kwargs: Any
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """Return the greedy chunk, in ``guarded_tasks`` the VLA's; see SB3's ``predict``."""
        if self._background.is_busy:
            self.finish_updates()
        action, state = super().predict(observation, *args, **kwargs)
        if self.guarded_tasks:
            guarded = np.isin(np.asarray(observation["task_id"]).reshape(-1), self.guarded_tasks)
            reference = np.asarray(observation["vla_action"], np.float32).reshape(action.shape)
            mask = guarded.reshape(guarded.shape + (1, 1))
            action = np.where(mask, reference, action).reshape(action.shape)
        return action, state

    def save(
        self,
        path: str | pathlib.Path | io.BufferedIOBase,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
    ) -> None:
        """Save networks, optimisers and generators to a zip file (replay: save_replay_buffer)."""
        if self._background.is_busy:
            self.finish_updates()
        self._rng_state = self._rng.get_state().cpu().numpy()
        super().save(path, exclude, include)

    def set_parameters(self, *args: Any, **kwargs: Any) -> None:
        """Load parameters; see SB3's ``set_parameters``."""
        super().set_parameters(*args, **kwargs)
        self.hand_over()

    def _excluded_save_params(self) -> list[str]:
        own = ["_rng", "_background", "_metrics", "acting", "loop", "clock"]
        return super()._excluded_save_params() + own + ["_acted_at", "_vla_seconds"]

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "policy.actor_optimizer", "policy.critic_optimizer"], []
