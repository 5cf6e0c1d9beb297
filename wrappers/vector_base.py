"""What the vector wrappers of observations share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from vla_gym.envs.checks import as_options
from vla_gym.envs.state import WrapperState, check_wrapper
from vla_gym.suites import get_task
from vla_gym.vector.env_row import row_in
from vla_gym.vector.shared_memory import RESET

Obs = dict[str, Any]
Step = tuple[Obs, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]

if TYPE_CHECKING:
    _Wrapper = gym.vector.VectorWrapper[Obs, np.ndarray, Obs, np.ndarray, np.ndarray]
else:
    _Wrapper = gym.vector.VectorWrapper  # takes no parameters in Gymnasium 1.2


class if_env_has:
    """Marks a method that a wrapper has only where the wrapped environment has it.

    Whoever asks ``hasattr(envs, "send")`` gets the wrapped environment's answer.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, wrapper: Any, owner: type | None = None) -> Any:
        if wrapper is None:
            return self._method
        getattr(wrapper.env, self._method.__name__)  # raises AttributeError
        return MethodType(self._method, wrapper)


class VectorObservationWrapper(_Wrapper):
    """Converts the observations of any vector environment, ``LiberoVectorEnv`` included.

    Gymnasium's class of this name refuses the autoreset mode SAME_STEP and knows neither
    ``step_wait`` nor ``recv``. ``step_async`` and ``send`` are there where the wrapped environment
    has them; every attribute that a subclass does not have (``groups``, ``call``, ``get_attr``,
    ``set_attr``, ...) is that of the wrapped environment.
    """

    env: Any  # has more methods than Gymnasium's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.env, name)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Obs, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``.

        Rows of the others hold what was made of their last observation.
        """
        # A copy: Gymnasium's own vector environments take the mask out of the caller's dict.
        options = None if options is None else as_options(options)
        mask = None if options is None else options.get("reset_mask")
        obs, infos = self.env.reset(seed=seed, options=options)
        env_ids = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        return self._convert_reset(obs, infos, env_ids)

    def step(self, actions: np.ndarray) -> Step:
        """Step all environments and convert what they return."""
        everyone = np.arange(self.num_envs)
        result = self.env.step(self._convert_actions(actions, everyone))
        self._note(everyone, actions)
        return self._convert_step(result)

    @if_env_has
    def step_async(self, actions: np.ndarray) -> None:
        """Begin a step; see the wrapped environment."""
        everyone = np.arange(self.num_envs)
        self.env.step_async(self._convert_actions(actions, everyone))
        self._note(everyone, actions)

    @if_env_has
    def send(self, actions: np.ndarray, env_ids: Sequence[int] | np.ndarray) -> None:
        """Begin a step in some environments; see the wrapped environment."""
        ids = np.atleast_1d(env_ids)
        self.env.send(self._convert_actions(actions, ids), env_ids)
        self._note(ids, actions)

    def step_wait(self, timeout: float | None = None) -> Step:
        """Wait for what ``step_async`` began, some seconds at most, and convert it."""
        return self._convert_step(self.env.step_wait(timeout=timeout))

    def recv(self, *args: Any, **kwargs: Any) -> Step:
        """Wait for environments that ``send`` or ``reset_send`` began, and convert their rows.

        The arguments are those of the wrapped environment's ``recv``.

        Returns:
            What ``step`` returns, with one row for each finished environment, sorted by
            ``infos["env_id"]``. Nothing is computed for the others.
        """
        return self._convert_step(self.env.recv(*args, **kwargs))

    def _convert_reset(
        self, obs: Obs, infos: dict[str, Any], env_ids: np.ndarray
    ) -> tuple[Obs, dict[str, Any]]:
        """Convert what a reset of the environments ``env_ids`` returned, with rows for all."""
        raise NotImplementedError

    def _convert_step(self, result: Step) -> Step:
        """Convert a step; ``infos["env_id"]`` says which rows it has, without it all."""
        raise NotImplementedError

    def _convert_actions(self, actions: Any, env_ids: np.ndarray) -> Any:  # noqa: ARG002
        """Return actions as the wrapped environment takes them; these by default."""
        return actions

    def _note(self, env_ids: np.ndarray, actions: Any) -> None:
        """Take note that environments have been sent actions; nothing by default."""


class VectorEpisodeWrapper(VectorObservationWrapper):
    """Keeps something of every environment's running episode, and adds it to the observations.

    It takes note of the actions that environments are stepped with, and of steps that begin an
    episode instead. A subclass gives ``_convert_reset``, ``_convert_step`` and ``_observe``. What
    is kept has ``save``, ``check`` and ``restore``, or the subclass has them with an underscore.
    """

    _kept: Any

    def __init__(self, env: gym.vector.VectorEnv[Obs, np.ndarray, np.ndarray]) -> None:
        """Wrap a vector of environments with Box actions."""
        super().__init__(env)
        n = env.num_envs
        self._everyone = np.arange(n)
        # What each environment is doing, and whether its next step is a reset.
        self._actions = np.zeros((n, *(env.single_action_space.shape or ())), np.float32)
        self._resetting, self._ended = np.zeros(n, bool), np.zeros(n, bool)

    @if_env_has
    def reset_send(self, env_ids: Sequence[int] | np.ndarray | None = None, **kwargs: Any) -> None:
        """Begin a reset of some environments, all by default; see the wrapped environment."""
        self.env.reset_send(env_ids, **kwargs)
        self._resetting[self._everyone if env_ids is None else np.atleast_1d(env_ids)] = True

    @if_env_has
    def begin(
        self,
        ids: np.ndarray,
        ops: np.ndarray,
        rows: Mapping[str, np.ndarray],
        *args: Any,
        each: bool,
    ) -> None:
        """Begin what another table asks of environments; see ``PartEnv.begin``."""
        self.env.begin(ids, ops, rows, *args, each=each)
        self._actions[ids], self._resetting[ids] = rows["action"], ops == RESET

    @if_env_has
    def get_state(self, env_ids: Sequence[int] | None = None) -> list[WrapperState]:
        """Return the states of environments with what is kept of them; they can be pickled."""
        states = self.env.get_state(env_ids)
        ids = self._everyone if env_ids is None else np.atleast_1d(env_ids)
        return [
            WrapperState(state, type(self).__name__, self._save(i), bool(self._ended[i]))
            for i, state in zip(ids.tolist(), states, strict=True)
        ]

    @if_env_has
    def set_state(self, states: Sequence[Any], env_ids: Sequence[int] | None = None) -> Obs:
        """Bring environments to states that :meth:`get_state` returned.

        Returns:
            The observations of all environments.

        Raises:
            ConfigError: If a state does not fit; nothing has changed then.
        """
        for state in states:
            self._check(check_wrapper(state, type(self).__name__).kept)
        obs = self.env.set_state([state.env for state in states], env_ids)
        ids = self._everyone if env_ids is None else np.atleast_1d(env_ids)
        for i, state in zip(ids.tolist(), states, strict=True):
            self._restore(i, state.kept)
            self._ended[i] = state.ended
        anew = ids[[begins_anew(state) for state in states]]
        if len(anew):
            return self._convert_reset(obs, instructions_of(self.env, obs, anew), anew)[0]
        return self._observe(obs, self._everyone)

    def _note(self, env_ids: np.ndarray, actions: Any) -> None:
        """Remember which actions are under way, and which of them begin an episode instead."""
        self._actions[env_ids] = actions
        self._resetting[env_ids] = self._ended[env_ids]

    def _steps(
        self, infos: dict[str, Any], ended: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return what the rows of a step are; where the next one resets is noted.

        Args:
            infos: Of the step.
            ended: (n,) bool, terminated or truncated.

        Returns:
            (n,) environments, bool: their observation begins an episode, and control steps that
            were executed: 0 where the step was a reset, and where a worker died over it; a large
            number if nobody says.
        """
        env_ids = np.asarray(infos.get("env_id", self._everyone))
        begun = self._resetting[env_ids]
        if "elapsed_steps" in infos:
            # An exception out of a step ends episodes of which no flag tells: the next step resets.
            begun |= infos["_elapsed_steps"] & (infos["elapsed_steps"] == 0) & ~ended
        executed = _executed_steps(infos, ended)
        executed[begun] = 0
        anew = infos.get("_final_obs", np.zeros(len(ended), bool))  # in SAME_STEP
        self._ended[env_ids] = ended & ~anew
        return env_ids, begun | anew, executed

    def _observe(self, obs: Obs, env_ids: np.ndarray) -> Obs:
        """Return the observations of environments with what is kept of them."""
        raise NotImplementedError

    def _save(self, env_id: int) -> dict[str, Any]:
        """Return what is kept of an environment's episode, by name."""
        saved: dict[str, Any] = self._kept.save(env_id)
        return saved

    def _check(self, kept: Mapping[str, Any]) -> None:
        """Raise ConfigError if what a state has kept does not fit."""
        self._kept.check(kept)

    def _restore(self, env_id: int, kept: Mapping[str, Any]) -> None:
        """Take over what a state has kept."""
        self._kept.restore(env_id, kept)


def begins_anew(state: Any) -> bool:
    """Tell whether ``set_state`` begins an episode: a worker had died over the saved one."""
    row = row_in(state)
    return row is not None and row.env is None and not row.ended


def instructions_of(env: Any, obs: Obs, env_ids: np.ndarray) -> dict[str, Any]:
    """Return infos with the instructions of some environments, which ``set_state`` does not tell.

    Environments that have no suite tell none.
    """
    try:
        suites = env.get_attr("suite")
    except AttributeError:
        return {}
    texts, told = np.full(env.num_envs, None, dtype=object), np.zeros(env.num_envs, bool)
    for i in env_ids.tolist():
        texts[i], told[i] = get_task(suites[i], int(obs["task_id"][i])).instruction, True
    return {"instruction": texts, "_instruction": told}


def _executed_steps(infos: dict[str, Any], ended: np.ndarray) -> np.ndarray:
    """Return how many control steps each row executed; a large number if no environment says so."""
    executed = np.full(len(ended), np.iinfo(np.int64).max)
    # In SAME_STEP the infos of an ended row are those of its reset.
    final = infos.get("final_info", {})
    for told in (infos, final):
        if "executed_steps" in told:
            mask = told["_executed_steps"]
            executed[mask] = told["executed_steps"][mask]
    # A step that died with its worker took no action; its observation is the one before it.
    lost = (final if "final_info" in infos else infos).get("worker_restarted", False)
    executed[ended & np.asarray(lost)] = 0
    return executed
