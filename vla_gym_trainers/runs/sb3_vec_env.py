"""Vector environments of Gymnasium for stable-baselines3's algorithms.

Use::

    from stable_baselines3 import TD3
    from vla_gym_trainers.runs.sb3_vec_env import make_sb3_vec_env

    env = make_sb3_vec_env("LiberoVLA-goal-v0", num_envs=8, gamma=0.99)
    model = TD3("MultiInputPolicy", env, gamma=0.99**8, buffer_size=20_000).learn(10_000)

What differs from an environment of single control steps:

- One of SB3's timesteps is one ``step`` of one environment, so it is a whole chunk.
- SB3's own algorithms discount a transition by their ``gamma``, however many control steps the
  chunk executed; ``info["discount"]`` (``gamma ** executed_steps``) is read by
  :class:`vla_gym_trainers.TD3BC` only. Without that, pass them the discount of a whole chunk:
  ``gamma=0.99 ** 8``.
- A worker that died ends its environments' episodes: ``done``, reward 0, ``TimeLimit.truncated``,
  the last observation as terminal observation, ``info["worker_restarted"]`` and no ``episode``.
  TD3BC leaves these transitions out. SB3's own algorithms cannot; to them it is a time limit, so
  they bootstrap from that last observation: one transition that stands still.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import (
    VecEnvIndices,
    VecEnvObs,
    VecEnvStepReturn,
)

from vla_gym.errors import ConfigError
from vla_gym_trainers.rollout.chunks import (
    ChunkEnvs,
    ChunkStep,
    RunningChunks,
    own,
    same_episode,
)
from vla_gym_trainers.rollout.collector import Envs

#: Reset options that may differ between the environments; -1 stands for none.
_EACH_ITS_OWN = ("task_id", "init_state_id")


def make_sb3_vec_env(
    env_id: str, num_envs: int = 1, *, seed: int | None = None, **kwargs: Any
) -> SB3VecEnv:
    """Make a vector environment by its id, for stable-baselines3.

    Args:
        env_id: ``"Libero-<suite>-v0"`` or ``"LiberoVLA-<suite>-v0"``.
        num_envs: Number of environments.
        seed: Environment i plays what a single environment with ``seed + i`` plays; used at the
            next reset. An algorithm that is given a seed sets its own.
        **kwargs: See :class:`vla_gym.vector.LiberoVectorEnv` and
            :func:`vla_gym.wrappers.make.make_libero_vla_vec`.

    Raises:
        ConfigError: If ``autoreset_mode`` is given and is not SAME_STEP, or a ``stride`` without
            ``vla_action`` in the observation.
    """
    import vla_gym  # noqa: F401  (registers the ids)

    kwargs.setdefault("autoreset_mode", AutoresetMode.SAME_STEP)
    vector_env = gym.make_vec(env_id, num_envs, **kwargs)
    try:
        env = sb3_vec_env(vector_env)
        observed = getattr(env.observation_space, "spaces", {})
        if kwargs.get("stride") is not None and "vla_action" not in observed:
            raise ConfigError(
                "With a stride the action is as long as the chunk that is observed: leave flat "
                "out, and name vla_action in obs_keys."
            )
    except BaseException:
        vector_env.close()
        raise
    if seed is not None:
        env.seed(seed)
    return env


def envs_of(env: VecEnv) -> Envs:
    """Return the environments behind SB3's interface, for a collector."""
    return env if isinstance(env, SB3VecEnv) else _OneGroup(env)


@contextmanager
def deferred_reset(env: VecEnv | None) -> Iterator[None]:
    """Leave a reset inside, which observes nothing, to the thread that steps the environments."""
    if isinstance(env, SB3VecEnv):
        env.defers_reset = True
    try:
        yield
    finally:
        if isinstance(env, SB3VecEnv):
            env.defers_reset = False


class _OneGroup:
    """All environments of any VecEnv of SB3, which is what is under way with it as well."""

    def __init__(self, env: VecEnv) -> None:
        self.env, self.num_envs, self.reset = env, env.num_envs, env.reset

    def groups(self, count: int) -> list[np.ndarray]:
        if count != 1:
            raise ConfigError(f"{type(self.env).__name__} has no groups: set groups to 1.")
        return [np.arange(self.num_envs)]

    def begin(self, actions: np.ndarray, env_ids: np.ndarray) -> _OneGroup:  # noqa: ARG002
        self.env.step_async(actions)
        return self

    def recv(self) -> ChunkStep:
        obs, rewards, dones, infos = self.env.step_wait()
        return ChunkStep(own(obs), same_episode(obs, dones, infos), rewards, dones, infos)


class SB3VecEnv(VecEnv):
    """A vector environment of Gymnasium behind SB3's interface; it must reset in the same step.

    Infos are those of :class:`vla_gym_trainers.rollout.chunks.ChunkStep`. ``episode["l"]`` counts
    calls of ``step``, which is what SB3 counts everywhere (control steps are
    ``info["episode_stats"]["length"]``). With a stride the action is the whole observed chunk.

    Attributes:
        vector_env: The vector environment.
        chunks: Steps it.
        defers_reset: See :func:`deferred_reset`.
    """

    def __init__(self, vector_env: VectorEnv[Any, Any, Any]) -> None:
        """Adapt a vector environment, which is closed with the adapter.

        Raises:
            ConfigError: If its autoreset mode is not SAME_STEP.
        """
        self.vector_env: Any = vector_env
        self.chunks = ChunkEnvs(vector_env)
        self.groups, self.begin = self.chunks.groups, self.chunks.begin
        self._running: RunningChunks | None = None
        self.defers_reset = False
        super().__init__(
            vector_env.num_envs, vector_env.single_observation_space, self.chunks.action_space
        )
        self.reset_infos = self.chunks.reset_infos

    @property
    def spec(self) -> Any:
        """The environment's spec, or None."""
        return self.vector_env.spec

    def reset(self) -> VecEnvObs:
        """Reset all environments with the seeds and options that were set for it."""
        if self.defers_reset:
            return {}
        seeds: Any = None if all(seed is None for seed in self._seeds) else list(self._seeds)
        obs: VecEnvObs = self.chunks.reset(seed=seeds, options=_join_options(self._options))
        self._reset_seeds()
        self._reset_options()
        return obs

    def step_async(self, actions: np.ndarray) -> None:
        """Begin the chunks; :meth:`step_wait` waits for them."""
        self._running = self.chunks.begin(actions, np.arange(self.num_envs))

    def step_wait(self) -> VecEnvStepReturn:
        """Execute the chunks, each up to its episode's end; see the class for the infos."""
        assert self._running is not None
        step = None
        while step is None:
            step = self._running.recv()
        return step.obs, step.rewards, step.dones, step.infos

    def get_state(self) -> dict[str, Any]:
        """Return what the future of all environments depends on; it can be pickled.

        For a vector environment with ``get_state`` and ``set_state``, such as LIBERO's.
        """
        return {
            "envs": self.vector_env.get_state(),
            "lengths": self.chunks.lengths.copy(),
            "returns": self.chunks.returns.copy(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`get_state` of a like environment returned."""
        self.vector_env.set_state(state["envs"])
        self.chunks.lengths[:] = state["lengths"]
        self.chunks.returns[:] = state["returns"]
        self._reset_seeds()  # seeds that an algorithm set for a reset that will not come
        self._reset_options()

    def close(self) -> None:
        """Close the vector environment."""
        self.vector_env.close()

    def get_images(self) -> Sequence[np.ndarray | None]:
        """Return one frame per environment, or None each if nothing is rendered."""
        if self.render_mode != "rgb_array":
            warnings.warn(
                f"Expected render_mode 'rgb_array', got {self.render_mode}.", stacklevel=2
            )
            return [None] * self.num_envs
        return list(self.vector_env.render())

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        """Return an attribute of the environments; see SB3."""
        if attr_name == "render_mode":  # SB3 asks for it at once: no need to ask the workers
            return [self.vector_env.render_mode for _ in self._get_indices(indices)]
        return self.env_method("get_wrapper_attr", attr_name, indices=indices)

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        """Set an attribute of the environments, or of the wrapper that has it; see SB3."""
        self.env_method("set_wrapper_attr", attr_name, value, indices=indices)

    def env_method(
        self,
        method_name: str,
        *method_args: Any,
        indices: VecEnvIndices = None,
        **method_kwargs: Any,
    ) -> list[Any]:
        """Call a method of the environments; see SB3."""
        ids = [int(i) for i in self._get_indices(indices)]
        if hasattr(self.vector_env, "call_some"):
            return list(self.vector_env.call_some(ids, method_name, *method_args, **method_kwargs))
        envs = self.vector_env.unwrapped.envs  # Gymnasium's SyncVectorEnv
        return [envs[i].get_wrapper_attr(method_name)(*method_args, **method_kwargs) for i in ids]

    def env_is_wrapped(
        self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        """Tell whether the environments have a wrapper of this name.

        True for SB3's ``Monitor``: its infos are there, and ``evaluate_policy`` may rely on them.
        """
        if issubclass(wrapper_class, Monitor):
            return [True for _ in self._get_indices(indices)]
        # The environments are in other processes: only their text, <Outer<Inner<Env>>>, gets here.
        texts = self.env_method("__str__", indices=indices)
        return [wrapper_class.__name__ in re.findall(r"<(\w+)", text) for text in texts]


def _join_options(options: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Turn one dict of reset options for each environment into those of the vector environment.

    Raises:
        ConfigError: If they differ in an option that must be the same for all.
    """
    joined: dict[str, Any] = {}
    for key in dict.fromkeys(key for one in options for key in one):
        if all(key in one and np.array_equal(one[key], options[0][key]) for one in options):
            joined[key] = options[0][key]
        elif key in _EACH_ITS_OWN:
            joined[key] = np.array([one.get(key, -1) for one in options])
        else:
            raise ConfigError(
                f"Expected the same reset option {key!r} for every environment, got {options}."
            )
    return joined or None


#: Adapts a vector environment; see :class:`SB3VecEnv`.
sb3_vec_env = SB3VecEnv
