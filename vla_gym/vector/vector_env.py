"""Many LIBERO environments over worker processes, as one Gymnasium vector environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import AutoresetMode

from vla_gym.envs.checks import as_integer, as_options, check_keywords
from vla_gym.envs.libero import LiberoEnv
from vla_gym.envs.schedule import TaskSampling
from vla_gym.errors import ConfigError
from vla_gym.vector.batch import Arrays
from vla_gym.vector.plan import EnvPlan, check_limits, parse_autoreset_mode
from vla_gym.vector.pool import start_pool
from vla_gym.vector.processes.interrupts import Interrupts, undivided
from vla_gym.vector.vector_base import VectorEnvBase


class LiberoVectorEnv(VectorEnvBase):
    """``num_envs`` LIBERO environments over ``workers`` processes.

    Environment i plays what ``LiberoEnv(..., env_index=i)`` with seed ``seed + i`` plays, whatever
    the number of workers and whatever happens to the others. Observations, actions, rewards, flags
    and numeric infos live in shared memory; a worker runs a whole chunk and renders once.

    infos are those of Gymnasium's ``SyncVectorEnv`` (arrays with ``_key`` masks; in SAME_STEP
    ``final_obs`` and ``final_info``) and:
        ``episode_stats``: at the step that ends an episode, in every autoreset mode: ``return``,
        ``length`` in control steps, ``success``, with masks;
        ``worker_restarted``: (num_envs,) bool, only in a step in which a worker was restarted.

    A worker that dies, hangs or raises is restarted, with a ``WorkerRestartWarning``. Its
    environments that were stepping report truncated=True, reward 0, their last observation (in
    SAME_STEP as ``final_obs``), ``worker_restarted`` and no ``episode_stats``: keep such rows out
    of a replay buffer. Environments that were being reset are reset again. Mistakes that the
    package itself reports (``VlaGymError``) are raised instead.

    Asynchronous use: :meth:`send` some environments' actions, :meth:`recv` whichever is done.
    """

    def __init__(
        self,
        num_envs: int,
        suite: str | Sequence[str] | None = None,
        *,
        workers: int | None = None,
        task_ids: int | str | Sequence[int | str] | Sequence[Sequence[int | str]] | None = None,
        task_sampling: TaskSampling = "uniform",
        group_size: int = 1,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        copy: bool = True,
        env_wrappers: Sequence[Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]] = (),
        env_factory: Callable[[int], gym.Env[Any, Any]] | None = None,
        render_devices: Sequence[int] | None = None,
        max_restarts: int = 5,
        step_timeout: float = 60.0,
        start_timeout: float = 300.0,
        env_ids: range | None = None,
        **env_kwargs: Any,
    ) -> None:
        """Start the workers and build the environments; simulations are built at the first reset.

        Args:
            num_envs: Number of environments N.
            suite: Suite name, e.g. ``"goal"``, or several, see ``LiberoEnv``.
            workers: Worker processes; None for one a core (at most N), 0 for none: the same code
                in this process.
            task_ids: One task, several, or all of the suite (None); or N lists, one for each
                environment.
            task_sampling: ``"uniform"`` draws each episode's task; ``"round_robin"`` goes through
                the list; ``"balanced"`` plays each task once in a shuffled block. A schedule: it
                depends on seed, environment and episode number, never on who finishes when.
            group_size: So many consecutive environments play the same tasks and layouts.
            autoreset_mode: ``"NEXT_STEP"``, ``"SAME_STEP"`` or ``"DISABLED"``, as Gymnasium's.
            copy: False returns views of the shared memory, valid until the next but one step.
            env_wrappers: Applied to each environment in its worker.
            env_factory: Builds environment i, instead of LiberoEnv. It is called in the worker.
            render_devices: EGL devices, given to the workers in turn.
            max_restarts: Failures of one worker in which none of its episodes ends, after which
                :class:`~vla_gym.errors.WorkerError` is raised; 0 raises it at once.
            step_timeout: A worker without progress for so many seconds counts as hung.
            start_timeout: The same while it starts, until it has answered once; also for
                compiling scenes that are new here.
            env_ids: Make these consecutive ones of the N environments alone, say one machine's
                part of them. Row k is environment ``env_ids[k]``: it plays what that one plays.
            **env_kwargs: Passed on to ``vla_gym.envs.libero.LiberoEnv``: ``assets``, ``chunk_len``,
                ``cameras``, ``image_size``, ``gamma``, ``init_states``, ``render_mode``...

        Raises:
            ConfigError, UnknownTaskError: If an argument is out of range.
            AssetError, CompileError: If the scenes can't be loaded.
            WorkerError: If the environments can't be built.
        """
        limits = check_limits(max_restarts, step_timeout, start_timeout, copy)
        max_restarts, step_timeout, start_timeout = limits
        if env_factory is None:
            check_keywords(env_kwargs, LiberoVectorEnv, LiberoEnv)
        self._plan = EnvPlan.make(
            num_envs,
            suite,
            task_ids=task_ids,
            task_sampling=task_sampling,
            group_size=group_size,
            env_wrappers=env_wrappers,
            env_factory=env_factory,
            **env_kwargs,
        )
        if env_ids is not None:
            self._plan = self._plan.part(env_ids)
        self.autoreset_mode = parse_autoreset_mode(autoreset_mode)
        self._interrupts = Interrupts()
        pool = start_pool(
            self._plan,
            workers,
            self._interrupts,
            render_devices=render_devices,
            step_timeout=step_timeout,
            start_timeout=start_timeout,
        )
        self._take_over(pool, max_restarts, copy)

    # Lock-step use

    @undivided
    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode in all environments, or in those of ``options["reset_mask"]``.

        Args:
            seed: Environment i gets ``seed + i``, or its entry of a sequence. It fixes all its
                following episodes. None goes on to the next episode.
            options: ``task_id`` and ``init_state_id``, a number or one for each environment (-1
                for none); ``reset_mask``: (num_envs,) bool.

        Raises:
            ConfigError, UnknownTaskError: If an option is unknown or out of range.
        """
        if self._interrupted:  # by Ctrl-C; its outcome is of no use to anybody
            self.end()
        self._idle("reset")
        ids, per_env = self._plan.reset_options(options)
        self._seed(ids, seed)
        self._batch.align()
        self._runner.reset(ids, per_env)
        self._wait_all()
        obs, _, _, _, infos = self._batch.collect(None, acted=ids)
        return obs, infos

    @undivided
    def step(self, actions: Any) -> Arrays:
        """Execute an action, or a chunk, in every environment.

        Args:
            actions: (num_envs, ...) as ``action_space``. The row of an environment that is reset
                instead (NEXT_STEP, after the end of its episode) is ignored.

        Returns:
            Observations, rewards (float64), terminations, truncations and infos.

        Raises:
            InvalidActionError: Wrong shape or not finite; nothing has moved then.
            gymnasium.error.ResetNeeded: Before the first reset; with DISABLED also for an
                environment whose episode is over.
            WorkerError: If a worker fails for good.
        """
        self.step_async(actions)
        return self.step_wait()

    @undivided
    def step_async(self, actions: Any) -> None:
        """Begin a step; :meth:`step_wait` returns what comes of it."""
        self._idle("step_async")
        self._assert_seeded()
        self._batch.align()
        self._batch.write_actions(actions, self._everyone)
        self._runner.step(self._everyone)
        self._waiting = "step"

    @undivided
    def step_wait(self, timeout: float | None = None) -> Arrays:
        """Wait for the step that :meth:`step_async` began.

        Raises:
            TimeoutError: After ``timeout`` seconds; it may be called again.
        """
        self._assert_open()
        if self._waiting != "step":
            raise NoAsyncCallError("step_wait() needs a step_async() before it.", "step")
        self._wait_all(timeout)
        return self._batch.collect(None)

    # Asynchronous use

    @undivided
    def send(self, actions: Any, env_ids: Sequence[int] | np.ndarray) -> None:
        """Begin a step in some environments; :meth:`recv` returns them when they are done.

        Args:
            actions: (len(env_ids), ...).
            env_ids: Environments with nothing under way.
        """
        ids = self._idle("send", env_ids, others_too=False)
        self._assert_seeded()
        self._batch.write_actions(actions, ids)
        self._runner.step(np.sort(ids), each=True)

    @undivided
    def reset_send(
        self,
        env_ids: Sequence[int] | np.ndarray | None = None,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        """Begin a reset of some environments, all by default; see :meth:`reset`, :meth:`recv`."""
        ids = self._idle("reset_send", env_ids, others_too=False)
        options = as_options(options)
        if "reset_mask" in options:
            raise ConfigError(
                "reset_send() expects the environments as env_ids, got options['reset_mask']: give "
                "env_ids=np.flatnonzero(reset_mask)."
            )
        mask = np.zeros(self.num_envs, bool)
        mask[ids] = True
        _, per_env = self._plan.reset_options({**options, "reset_mask": mask})
        self._seed(ids, seed)
        self._runner.reset(np.sort(ids), per_env, each=True)

    @undivided
    def recv(
        self,
        min_envs: int | None = None,
        timeout: float | None = None,
        *,
        env_ids: Sequence[int] | np.ndarray | None = None,
    ) -> Arrays:
        """Wait for environments that :meth:`send` or :meth:`reset_send` set going.

        Args:
            min_envs: Return so many, those that were done first; None for all that are going.
            timeout: Seconds.
            env_ids: Return these in place of the first ones, whichever are done before.

        Returns:
            As :meth:`step`, with one row for each of the environments ``infos["env_id"]``, in
            ascending order. A reset has reward 0 and no flags.

        Raises:
            TimeoutError: After ``timeout`` seconds; nothing is lost.
            ConfigError: If fewer environments are going.
        """
        self._assert_open()
        table, finished = self._table, self._table.finished
        if self._waiting is not None:
            raise AlreadyPendingCallError("recv() does not end a step_async().", self._waiting)
        if env_ids is not None:
            chosen = set(self._check_ids(env_ids).tolist())
            if idle := sorted(chosen - set(self.going().tolist())):
                raise ConfigError(f"recv() waits for environments that are going; {idle} are not.")
            self._wait(lambda: chosen <= set(finished), timeout)
        else:
            going = int(table.busy.sum()) + len(finished)
            if not going:
                raise ConfigError("Nothing was sent: call send() or reset_send() first.")
            wanted = going if min_envs is None else as_integer(min_envs, "min_envs")
            if not 1 <= wanted <= going:
                raise ConfigError(f"recv() can wait for 1 to {going} environments, got {wanted}.")
            self._wait(lambda: len(finished) >= wanted, timeout)
            chosen = set(finished[:wanted])
        finished[:] = [i for i in finished if i not in chosen]
        ids = np.array(sorted(chosen), np.int64)
        result = self._batch.collect(ids)
        result[4]["env_id"] = ids
        return result
