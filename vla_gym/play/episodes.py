"""Plays the episodes of ``vla-gym play``, whoever acts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.play.camera import Camera, Filmed
from vla_gym.play.config import PlayConfig
from vla_gym.suites import Task

if TYPE_CHECKING:
    from vla_gym.rl_token import RLTokenEncoder


@dataclass(frozen=True)
class Start:
    """Where an episode begins: an official state, or a layout sampled with a seed."""

    task: Task
    init_state_id: int | None
    seed: int

    @property
    def name(self) -> str:
        """What a caption and a result line call it."""
        where = f"seed {self.seed}" if self.init_state_id is None else f"state {self.init_state_id}"
        return f"{self.task.suite} {self.task.task_id}, {where}"


@dataclass(frozen=True)
class Outcome:
    """How an episode ended."""

    start: Start
    success: bool
    steps: int

    def __str__(self) -> str:
        """Return the result line."""
        end = "success" if self.success else "no success"
        return f"{self.start.name}: {end}, {self.steps} steps ({self.start.task.instruction})"


class Players:
    """Plays episodes; the environment is kept while the task is the same."""

    def __init__(self, config: PlayConfig, act: Callable[[Any], np.ndarray] | None) -> None:
        """Load the VLA and the policy, if they play."""
        self._config, self._act = config, act
        self._env: gym.Env[Any, Any] | None = None
        self._task: Task | None = None
        self._chunk_len = config.chunk_len
        self._vla: Any = None
        self._rl_token: RLTokenEncoder | None = None
        self._plays: str | None = None  # the VLA that PPO or GRPO has trained
        if config.policy is not None:
            self._plays = _trained_on_tokens(config)
        if config.policy is not None and self._plays is None:
            policy = load_trained_policy(config.policy)
            self._chunk_len = int(policy.action_space.shape[0])
            self._act = lambda obs: policy.predict(obs, deterministic=True)[0]
        if config.who in ("vla", "policy"):
            self._load_vla(config)

    def _load_vla(self, config: PlayConfig) -> None:
        from vla_gym.rl_token import choose_rl_token
        from vla_gym.vla import load

        vla, token, given = config.vla, config.rl_token, True
        if config.policy is not None:
            from vla_gym_trainers.evaluation.trained_on import trained_on

            known = trained_on(config.policy)
            # What a run's configuration names is a checkpoint, never a class to import.
            vla, token, given = vla or known.vla, token or known.rl_token, vla is not None
            vla = self._plays or vla
        if vla is None or isinstance(vla, str):
            self._vla = load(vla or "mini", device=config.device, allow_class=given)
        else:
            self._vla = vla
        self._rl_token = None  # the VLA alone does not look at it
        if config.who == "policy" and self._plays is None:
            self._rl_token = choose_rl_token(token or "auto", self._vla, config.device)

    def play(self, start: Start, camera: Camera) -> Outcome:
        """Play an episode to its end."""
        env = self._environment(start.task, camera)
        options = None if start.init_state_id is None else {"init_state_id": start.init_state_id}
        # With an official state, the seed decides nothing but how the scene looks.
        obs, info = env.reset(seed=start.seed or start.init_state_id or 0, options=options)
        choose = self._chooser(start, env)
        steps, over = 0, False
        while not over:
            obs, _, terminated, truncated, info = env.step(choose(obs))
            steps += int(info["executed_steps"])
            over = terminated or truncated
        return Outcome(start, bool(info["success"]), steps)

    def _chooser(self, start: Start, env: gym.Env[Any, Any]) -> Callable[[Any], np.ndarray]:
        """Return the function from observations to actions."""
        if self._config.who == "expert":
            from vla_gym.experts import make_expert

            expert = make_expert(env.unwrapped.sim)  # type: ignore[attr-defined]
            return lambda _: expert.act()
        if self._config.who == "random":
            rng = np.random.default_rng([start.seed, start.init_state_id or 0])
            return lambda _: rng.uniform(-1.0, 1.0, 7)
        return self._act or (lambda obs: np.array(obs["vla_action"]))

    def _environment(self, task: Task, camera: Camera) -> gym.Env[Any, Any]:
        if self._env is not None and self._task == task:
            return self._env
        self.close()
        from vla_gym.envs.libero import LiberoEnv

        config = self._config
        kwargs: dict[str, Any] = {"cameras": ()}
        if self._vla is not None:
            kwargs = {"image_size": self._vla.image_size}
        env: gym.Env[Any, Any] = Filmed(
            LiberoEnv(
                task.suite,
                task_ids=task.task_id,
                assets=config.assets,
                physics=config.physics,
                max_control_steps=config.max_steps,
                variation=config.variation,
                **kwargs,
            ),
            camera,
        )
        if self._vla is not None:
            from vla_gym.wrappers import ActionChunk, FrozenVLAObservation

            chunk_len = self._chunk_len or self._vla.horizon
            env = FrozenVLAObservation(ActionChunk(env, chunk_len), self._vla, self._rl_token)
        self._env, self._task = env, task
        return env

    def close(self) -> None:
        """Free the environment."""
        if self._env is not None:
            self._env.close()
            self._env = None


def _trained_on_tokens(config: PlayConfig) -> str | None:
    """Return the VLA that PPO or GRPO has trained, acting by its tokens, if it is their run."""
    run = config.policy
    if run is None or not run.is_dir() or (run / "policy.zip").is_file():
        return None
    from vla_gym.vla.spec_options import with_option
    from vla_gym_trainers.evaluation.trained_on import trained_on, trained_vla

    vla = trained_vla(run, config.vla or trained_on(run).vla)
    return None if vla is None else with_option(vla, "head", "token")


def load_trained_policy(path: Path) -> Any:
    """Load a policy of ``vla-gym-train``.

    Raises:
        ConfigError: If the trainers' extra is not installed.
        WeightsError: If there is no such file or it cannot be read.
    """
    try:
        with redirect_stderr(StringIO()):  # the banner of the old gym, which SB3 picks up
            import stable_baselines3  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"A trained policy needs the trainers ({error}): pip install 'vla-gym[trainers]'"
        ) from error
    from vla_gym_trainers.evaluation.evaluate import load_policy

    return load_policy(path)
