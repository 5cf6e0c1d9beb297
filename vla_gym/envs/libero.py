"""The single environment: Gymnasium's contract over a suite's simulation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

from vla_gym.actions import as_action
from vla_gym.envs.base import LiberoEnvBase
from vla_gym.envs.checks import parse_reset_options, parse_tasks
from vla_gym.envs.state import EnvState
from vla_gym.errors import ConfigError
from vla_gym.suites import task_number
from vla_gym.suites.protocol import Task


class LiberoEnv(LiberoEnvBase):
    """Tasks of a suite, or of several that agree in spaces.

    Observation, a Dict of:
        one entry a camera, e.g. ``agentview``, ``wrist``: (image_size, image_size, 3) uint8,
        upright;
        with ``depth``, ``agentview_depth``...: (image_size, image_size) float32, metres along the
        camera's axis;
        with ``segmentation``, ``agentview_segmentation``...: (image_size, image_size) int32, geom
        ids, -1 where nothing is; :meth:`geom_bodies` names their bodies;
        ``proprio``: float32, the suite's ``proprio.size`` numbers; of LIBERO (8,): end-effector
        position (m), axis-angle (rad), finger joints (m);
        ``task_id``: index of the task in the suite (of several suites: in all their tasks).

    Action: float32 (A,), or (chunk_len, A), with the suite's ``action.size`` A; of LIBERO (7,) in
    [-1, 1]: translation (1.0 = 5 cm), rotation (1.0 = 0.5 rad), gripper (-1 opens, +1 closes). One
    row is one control step (of LIBERO 50 ms).

    Reward: 1.0 on success, else 0; inside a chunk it is discounted by ``gamma`` if that is given.
    With ``reward="staged"`` it is by how much the share of the goal's conditions that hold
    (``info["progress"]``, in [0, 1]) has grown in a control step, less than 0 if it has shrunk:
    undiscounted rewards of an episode add up to the progress at its end minus that at its reset.
    ``terminated`` means success, ``truncated`` the step limit; they are never true together. A
    chunk stops at the first of success, limit and its end.

    info: ``success``, ``is_success``, ``executed_steps`` (of this call), ``elapsed_steps`` (of the
    episode), ``instruction``, ``task_id``, ``init_state_id`` (-1 for a sampled layout), with
    several suites the task's ``suite``, with a staged reward ``progress`` and, when ``gamma`` is
    given, ``discount`` = gamma ** executed_steps. When scenes vary, ``variation``: float64
    (VARIATION_WIDTH,), to be read with :meth:`DomainVariation.describe
    <vla_gym.variation.DomainVariation.describe>`.

    Which episode comes next depends on (seed, episode number) alone, and on weights that are set
    (:meth:`set_task_weights`), see :class:`~vla_gym.envs.schedule.TaskSchedule`.
    ``reset(seed=...)`` starts the count again, :meth:`seek` goes to any episode,
    ``reset(options={"task_id": t, "init_state_id": i})`` overrides one; its look depends on (seed,
    episode number // ``scene_reset_interval``) alone and changes neither. :meth:`get_state` and
    :meth:`set_state` save and continue an episode; a pickle or ``copy.deepcopy`` of the environment
    goes on with it too.

    Attributes:
        schedule: Which task and layout each episode has.
        next_episode: What the next reset without a seed plays, as arguments of :meth:`seek`; None
            as long as no seed has been given or drawn.
        tasks: The tasks of the schedule, in its order.
        on_control_step: Functions of the environment and its info that are called at each reset
            and after each control step, also of those inside a chunk. Empty by default; the
            episodes are the same with and without.
        replace_action: None, or a function from a row of an action (7,) to the row that is
            executed in its place, called directly before that control step.
    """

    next_episode: tuple[int, int, int] | None = None
    # The present episode.
    _elapsed = 0
    _init_state_id = -1
    _needs_reset = True
    _progress = 0.0  # known with a staged reward alone

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Start an episode.

        Args:
            seed: Fixes this and all following episodes, and starts their count again.
            options: ``task_id`` and ``init_state_id`` for this episode only.

        Raises:
            ConfigError: If an option is unknown or out of range, or the seed is smaller than
                ``schedule.min_seed``.
            UnknownTaskError: If there is no such task.
        """
        task_id, init_state_id = parse_reset_options(self._suite, options)
        if seed is not None:
            self.seek(seed, 0)
            seed = int(seed)
        super().reset(seed=seed)
        if self.next_episode is None:
            self.seek(int(self.np_random.integers(2**31)) + self.schedule.min_seed, 0)
        assert self.next_episode is not None
        seed, episode, index = self.next_episode
        # Drawn in any case, so that an option changes nothing else.
        drawn, key_seed, rng = self.schedule.task_and_rng(seed, episode, index)
        task_id = drawn if task_id is None else task_id
        model = self._model(task_id, clutter=self.cluttered)
        if init_state_id is None and self.init_states:
            init_state_id = self.init_states[(key_seed + episode) % len(self.init_states)]
        if init_state_id is None:
            layout = model.sample_layout(rng)
        else:
            layout = model.official_layout(init_state_id)
        self._needs_reset = True  # until the new episode stands
        self._sim = self._scenes.simulation(model)
        look = None
        if self.variation is not None:  # from a random stream of its own
            look = self.variation.draw(key_seed, episode // self.scene_reset_interval, self._sim)
        self._sim.set_variation(look)
        self._sim.reset(layout)
        self._task_id, self._elapsed = task_id, 0
        self._init_state_id = layout.init_state_id
        self._gain()
        observation = self.observe()
        self.next_episode = seed, episode + 1, index
        self._needs_reset = False
        info = self._info(success=False, executed=0)
        for function in self.on_control_step:
            function(self, info)
        return observation, info

    def seek(self, seed: int, episode: int, env_index: int | None = None) -> None:
        """Make the next reset without a seed play a certain episode; the present one goes on.

        Args:
            seed: The environment's seed.
            episode: Number of the episode that ``reset(seed=seed)`` and ``episode`` more resets
                would begin.
            env_index: Play what that environment of the vector env would, until the next seed;
                None: what this one does.

        Raises:
            ConfigError: If one is not an integer, negative, or the seed is smaller than
                ``schedule.min_seed``.
        """
        self.next_episode = self.schedule.check(seed, episode, env_index)

    def set_task_weights(self, weights: Mapping[int, float]) -> None:
        """Draw the tasks of the episodes that follow by weights; the present one goes on.

        Layouts stay those of seed and episode number. No saved state has weights, and a worker that
        is restarted begins without: set them again.

        Args:
            weights: By task id, see :meth:`TaskSchedule.set_weights
                <vla_gym.envs.schedule.TaskSchedule.set_weights>`.

        Raises:
            ConfigError: If they are no weights, or tasks are not drawn.
            UnknownTaskError: If there is no such task.
        """
        if isinstance(weights, Mapping):
            parse_tasks(self._suite, tuple(weights))
        self.schedule.set_weights(weights)

    def get_state(self) -> EnvState:
        """Return everything that the future of the episode, and the ones after it, depends on.

        Weights of tasks are not in it.

        Raises:
            gymnasium.error.ResetNeeded: Before the first reset.
        """
        snapshot = self.sim.get_state()
        assert self.next_episode is not None
        seed, episode, index = self.next_episode
        return EnvState(
            suite=self._task.suite,
            task_id=self._task.task_id,
            physics=self.physics,
            snapshot=snapshot,
            elapsed_steps=self._elapsed,
            needs_reset=self._needs_reset,
            init_state_id=self._init_state_id,
            seed=seed,
            next_episode=episode,
            env_index=index,
            clutter=bool(self.task_model.clutter),
        )

    def set_state(self, state: EnvState) -> dict[str, Any]:
        """Continue a saved episode, exactly as the environment that saved it would.

        The state is that of :meth:`get_state`, maybe of another environment or process, or of
        another task or scene of the suite. Afterwards the next reset plays what the original would
        have played next.

        Returns:
            The observation of that moment.

        Raises:
            ConfigError: If the state belongs to another suite, asset pack or physics mode, or its
                episode is past the step limit; nothing has changed then.
        """
        if not isinstance(state, EnvState):
            raise ConfigError(f"Expected an EnvState of get_state(), got {type(state).__name__}.")
        if state.suite not in self.suite.split("+") or state.physics != self.physics:
            raise ConfigError(
                f"The state was saved with suite {state.suite!r} and physics {state.physics!r}, "
                f"this environment has {self.suite!r} and {self.physics!r}."
            )
        task_id = task_number(self._suite, f"{state.suite}/{state.task_id}")
        model = self._model(task_id, clutter=state.clutter)
        if state.snapshot.scene_key != model.scene_key:
            raise ConfigError(
                f"The state belongs to scene {state.snapshot.scene_key!r}, its task has the scene "
                f"{model.scene_key!r} here: both environments need the same assets and versions."
            )
        limit = self._limit(task_id)
        if not state.needs_reset and state.elapsed_steps >= limit:
            raise ConfigError(
                f"The state is {state.elapsed_steps} control steps into its episode, which ends "
                f"after {limit} here: give both environments the same max_control_steps."
            )
        self.seek(state.seed, state.next_episode, state.env_index)
        self._needs_reset = True  # until the episode stands
        self._sim = self._scenes.simulation(model)
        self._sim.set_state(state.snapshot)
        self._task_id, self._elapsed = task_id, state.elapsed_steps
        self._init_state_id = state.init_state_id
        self._gain()
        observation = self.observe()
        self._needs_reset = state.needs_reset
        return observation

    def step(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Run one control step, or one chunk of them.

        Raises:
            InvalidActionError: Wrong shape, or a value that is not finite; nothing has moved then.
            gymnasium.error.ResetNeeded: Before the first reset, or after the episode's end.
        """
        if self._needs_reset or self._sim is None:
            raise gym.error.ResetNeeded("The episode is over or never began: call reset() first.")
        rows = as_action(action, self.action_space.shape)
        limit = self._limit(self._task_id)
        rows = rows.reshape(-1, rows.shape[-1])[: limit - self._elapsed]
        one_by_one = self.on_control_step or self.replace_action or self._staged
        executed, success, reward = 0, False, 0.0
        for part in rows[:, None] if one_by_one else rows[None]:  # each a chunk for the simulation
            if self.replace_action is not None:
                part = np.asarray(self.replace_action(part[0]), np.float64)[None]
            steps, success = self.sim.run_chunk(part)
            self._elapsed += steps
            executed += steps
            reward += self._discount(executed - 1) * self._gain(success)
            for function in self.on_control_step:
                function(self, self._info(success, executed))
            if success:
                break
        truncated = not success and self._elapsed >= limit
        self._needs_reset = success or truncated
        return self.observe(), reward, success, truncated, self._info(success, executed)

    def _discount(self, steps: int) -> float:
        """Return how much a reward counts that is given so many control steps later."""
        return 1.0 if self.gamma is None else float(self.gamma**steps)

    def _gain(self, success: bool = False) -> float:
        """Return the reward for what has been reached since the last look."""
        if not self._staged:
            return float(success)
        before, self._progress = self._progress, self.sim.progress()
        return self._progress - before

    @property
    def _task(self) -> Task:
        return self._suite.tasks[self._task_id]

    def _limit(self, task_id: int) -> int:
        return self.max_control_steps or self._suite.tasks[task_id].max_control_steps

    def _info(self, success: bool, executed: int) -> dict[str, Any]:
        info: dict[str, Any] = {
            "success": success,
            "is_success": success,
            "executed_steps": executed,
            "elapsed_steps": self._elapsed,
            "instruction": self._task.instruction,
            "task_id": self._task_id,
            "init_state_id": self._init_state_id,
            **self._task.facts,
        }
        if self._task.suite != self.suite:
            info["suite"] = self._task.suite
        if self.gamma is not None:
            info["discount"] = self._discount(executed)
        if self._staged:
            info["progress"] = self._progress
        if (variation := self.sim.variation) is not None:
            info["variation"] = variation
        return info
