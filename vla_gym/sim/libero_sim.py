"""The simulation of one LIBERO task: reset, step, chunks, success, snapshots."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import mujoco
import numpy as np

from vla_gym.actions import as_action
from vla_gym.errors import ConfigError
from vla_gym.outside import check_words
from vla_gym.sim.access import ObservationTiming, SimAccess
from vla_gym.sim.controller_data import ControllerState, StepTrace
from vla_gym.sim.model_io import load_shared
from vla_gym.sim.osc_exact import ExactController
from vla_gym.sim.osc_fast import FastController
from vla_gym.sim.snapshot import Snapshot
from vla_gym.suites.libero.goals import evaluate_goal
from vla_gym.suites.libero.model import TaskModel
from vla_gym.suites.libero.spec import ACTION, SETTLE_STEPS, Layout
from vla_gym.variation.appearance import Appearance, ModelAppearance, make_appearance
from vla_gym.variation.clutter import ClutterPlaces, ClutterSurvey
from vla_gym.variation.drawn import check_vector

Physics = Literal["fast", "exact"]

NOOP = np.array(ACTION.noop)
# Sampled layouts start in the air: as many control steps more than official states, at most.
MAX_EXTRA_SETTLE_STEPS = 60
REST_SPEED = 0.01
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION

# Settled official states of this process, newest last; see the key in LiberoSim.reset.
_settled: OrderedDict[tuple[str, str, bytes, int, float], Snapshot] = OrderedDict()
_MAX_SETTLED = 2048


class LiberoSim(SimAccess):
    """One LIBERO simulation.

    Simulations of the same scene share one ``MjModel``; each owns its ``MjData``.

    Attributes:
        task_model: The compiled task that is played.
        physics: ``"fast"`` (compiled, the default) or ``"exact"`` (upstream's loop bit for bit).
    """

    def __init__(
        self,
        task_model: TaskModel,
        *,
        physics: Physics = "fast",
        observation_timing: ObservationTiming = "libero",
        settle_steps: int = SETTLE_STEPS,
        settle_gripper: float = ACTION.noop[6],
    ) -> None:
        """Create the simulation; :meth:`reset` must be called before stepping.

        An episode begins after ``settle_steps`` no-ops with the gripper command ``settle_gripper``.

        Raises:
            ConfigError: Unknown ``physics`` or ``observation_timing``.
        """
        check_words(physics, Physics, "physics")
        self.physics: Physics = physics
        super().__init__(task_model, load_shared(task_model), observation_timing)
        self._settling = (settle_steps, settle_gripper)
        self._controller = ControllerState()
        parts = (self._model, self._data, task_model.robot, self._trace)
        self._exact = ExactController(*parts)
        self._loop = FastController(*parts) if physics == "fast" else self._exact
        self._variation: np.ndarray | None = None
        self._appearance: Appearance | None = None
        self.set_task(task_model)

    def set_task(self, task_model: TaskModel) -> None:
        """Play another task of the same scene from now on; the state is kept.

        Raises:
            ConfigError: If the task belongs to another scene.
        """
        self._check_scene("task", task_model.scene_key)
        self.task_model = task_model

    def reset(self, layout: Layout, *, settle: bool = True) -> None:
        """Start an episode from a layout.

        Args:
            layout: Positions, fixture poses and null-space target.
            settle: Run the no-ops, of a sampled layout until its objects rest.
        """
        key = (self.task_model.scene_key, self.physics, layout.content(), *self._settling)
        if settle and key in _settled:
            _settled.move_to_end(key)
            self._restore(_settled[key])
            return
        appearance = self._appearance
        if self.task_model.clutter:
            # Clutter comes when all is settled: an episode begins as it would without.
            self._appearance = None
        self._start(layout)
        if settle:
            self._settle(until_rest=layout.init_state_id < 0)
            if layout.init_state_id >= 0:
                _settled[key] = self.get_state()
                if len(_settled) > _MAX_SETTLED:
                    _settled.popitem(last=False)
        if self._appearance is not appearance:
            self._appearance = appearance
            self._restore(self.get_state())

    def _start(self, layout: Layout) -> None:
        """Put a layout into the simulation, as upstream's reset and ``set_init_state`` do."""
        data, model = self._data, self._model
        nullspace = np.array(layout.nullspace_qpos, dtype=np.float64)
        self._fixture_pos = np.array(layout.fixture_pos, dtype=np.float64)
        self._fixture_quat = np.array(layout.fixture_quat, dtype=np.float64)
        with self._shared.lock:
            self._write_model()
            mujoco.mj_resetData(model, data)
            # Upstream makes its controller at the reset posture, before anything is placed: there
            # the first goal and the first reading of the arm come from.
            data.qpos[self.task_model.robot.joint_qpos] = nullspace
            stale = self._exact.read()
            mujoco.mj_resetData(model, data)
            data.time = layout.time
            data.qpos[:] = layout.qpos
            data.qvel[:] = layout.qvel
            mujoco.mj_forward(model, data)
        self._trace.write(StepTrace.of(data.qpos, data.qvel))
        self._controller = ControllerState(
            stale.pos.copy(), stale.mat.copy(), np.zeros(2), nullspace, stale
        )

    def _settle(self, *, until_rest: bool) -> None:
        """Run no-ops; with ``until_rest`` until no object moves, within bounds."""
        steps, gripper = self._settling
        noop = np.append(NOOP[:6], gripper)[None]
        for step in range(steps + MAX_EXTRA_SETTLE_STEPS * until_rest):
            if step >= max(steps, 1) and max(self.object_speeds().values(), default=0) < REST_SPEED:
                break
            self._advance(noop)

    def step(self, action: np.ndarray) -> bool:
        """Execute one control step of 50 ms.

        Args:
            action: (7,) position delta (3), rotation delta (3), gripper (1: -1 opens, +1 closes);
                clipped to [-1, 1].

        Returns:
            Whether the goal is reached after it.

        Raises:
            InvalidActionError: Wrong shape or not finite; nothing has moved then.
        """
        return self._advance(as_action(action, (ACTION.size,))[None])[1]

    def run_chunk(self, actions: np.ndarray) -> tuple[int, bool]:
        """Execute control steps until the goal is reached or the chunk ends.

        Args:
            actions: (C, 7), see :meth:`step`.

        Returns:
            The number of control steps executed, and whether the goal is reached after the last.

        Raises:
            InvalidActionError: Wrong shape or not finite; nothing has moved then.
        """
        return self._advance(as_action(actions, (None, ACTION.size)))

    def _advance(self, actions: np.ndarray) -> tuple[int, bool]:
        """Execute checked actions until the goal is reached; return how many, and whether it is."""
        with self._shared.lock:
            self._write_model()
            for done, action in enumerate(actions, 1):
                self._loop.step(action, self._controller)
                if self.success():
                    return done, True
        return len(actions), False

    @property
    def variation(self) -> np.ndarray | None:
        """What the scene looks like, see ``DomainVariation.describe``; None: as it is."""
        return None if self._variation is None else self._variation.copy()

    def set_variation(self, vector: np.ndarray | None) -> None:
        """Give the scene another appearance from now on; a reset keeps it.

        Light, cameras and colours change nothing but images. Distractors are solid; set before a
        reset, they are there from the first step of the episode on.

        Args:
            vector: float64 (VARIATION_WIDTH,), see ``DomainVariation.describe``; None for LIBERO's
                own appearance.

        Raises:
            ConfigError: If it is no such vector, or has clutter that the scene lacks.
        """
        if vector is None and self._variation is None:
            return
        appearance = None
        if vector is not None:
            vector = check_vector(vector)
            with self._shared.lock:
                plain, task = self._unvaried(), self.task_model
                sizes = self._clutter_places().sizes if task.clutter else {}
                appearance = make_appearance(plain, self._model, task, vector, sizes)
        self._variation, self._appearance = vector, appearance
        with self._shared.lock:
            self._write_model()
            mujoco.mj_camlight(self._model, self._data)

    def place_distractors(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Draw where clutter stands, see ``ClutterPlaces.draw``; nothing is changed yet."""
        with self._shared.lock:
            return self._clutter_places().draw(count, rng)

    def _unvaried(self) -> ModelAppearance:
        """Return what the shared model looks like without variation; hold its lock."""
        return self._shared.once("unvaried", lambda: ModelAppearance(self._model, self.task_model))

    def _clutter_places(self) -> ClutterPlaces:
        """Return where clutter may stand in the task; hold the model's lock."""

        def find() -> ClutterPlaces:
            # Without anybody's variation; simulations write theirs before they need it.
            self._unvaried().show(None)
            return ClutterSurvey(self._model, self.task_model).places()

        return self._shared.once(f"clutter places of {self.task_model.task.key}", find)

    def _write_model(self) -> None:
        super()._write_model()
        if "unvaried" in self._shared.derived:  # some simulation has varied it
            self._unvaried().show(self._appearance)

    def success(self) -> bool:
        """Return whether the task's goal holds now, by upstream's rules."""
        return evaluate_goal(self.task_model.goal, self._data)

    def get_state(self) -> Snapshot:
        """Return everything that the future depends on."""
        physics = np.empty(mujoco.mj_stateSize(self._model, _STATE))
        mujoco.mj_getState(self._model, self._data, physics, _STATE)
        return Snapshot(
            scene_key=self.task_model.scene_key,
            physics=physics,
            trace=self._trace.copy(),
            controller=self._controller.copy(),
            fixture_pos=self._fixture_pos.copy(),
            fixture_quat=self._fixture_quat.copy(),
            variation=self.variation,
        )

    def set_state(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot: same future, same images, same success.

        Raises:
            ConfigError: If the snapshot belongs to another scene.
        """
        self._check_scene("snapshot", snapshot.scene_key)
        self.set_variation(snapshot.variation)
        self._restore(snapshot)

    def _check_scene(self, what: str, key: str) -> None:
        if key != self.task_model.scene_key:
            raise ConfigError(
                f"The {what} belongs to scene {key!r}, this simulation to "
                f"{self.task_model.scene_key!r}: make a new LiberoSim for another scene."
            )

    def _restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot of this scene, with the present appearance."""
        data = self._data
        self._fixture_pos = snapshot.fixture_pos.copy()
        self._fixture_quat = snapshot.fixture_quat.copy()
        self._controller = snapshot.controller.copy()
        self._trace.write(snapshot.trace)
        with self._shared.lock:
            self._write_model()
            mujoco.mj_setState(self._model, data, snapshot.physics, _STATE)
            data.qpos[:], data.qvel[:] = snapshot.trace.qpos, snapshot.trace.qvel
            mujoco.mj_step1(self._model, data)
            mujoco.mj_setState(self._model, data, snapshot.physics, _STATE)
