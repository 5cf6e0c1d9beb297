"""States around the success of a goal, for tests that compare predicates with upstream's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
from upstream import Upstream

from vla_gym.suites.libero import TaskModel, evaluate_goal
from vla_gym.suites.libero.goals import IN_SITE, JOINT, ON_OBJECT, Predicate


@dataclass
class State:
    """Positions and fixture poses of one state at rest."""

    qpos: np.ndarray
    fixture_pos: np.ndarray
    fixture_quat: np.ndarray


class StateMaker:
    """Draws states of one scene, many of them just inside or outside a goal."""

    def __init__(self, task_model: TaskModel) -> None:
        self.model = mujoco.MjModel.from_binary_path(str(task_model.mjb_path))
        self.data = mujoco.MjData(self.model)
        fixtures = (task_model.objects[name].body for name in task_model.fixtures)
        self.bodies = [self.model.body(body).id for body in fixtures]

    def show(self, state: State) -> mujoco.MjData:
        """Put a state into the simulation."""
        self.model.body_pos[self.bodies] = state.fixture_pos
        self.model.body_quat[self.bodies] = state.fixture_quat
        self.data.qpos[:] = state.qpos
        mujoco.mj_forward(self.model, self.data)
        return self.data

    def near(self, task_model: TaskModel, rng: np.random.Generator) -> State:
        """Draw a state around a task's goal."""
        state = self._background(task_model, rng)
        # What something else must be on comes first: placing it later would take it away.
        carriers = {p.target_body for p in task_model.goal if p.kind == ON_OBJECT}
        for predicate in sorted(task_model.goal, key=lambda p: p.body not in carriers):
            if predicate.kind == JOINT:
                spread = rng.choice([0.0, 1e-16, 1e-9, 1e-3, 0.05])
                for address in predicate.joint_qpos:
                    value = predicate.threshold + spread * rng.normal()
                    state.qpos[address] = value
            else:
                self._place(predicate, state, rng)
        return state

    def _background(self, task_model: TaskModel, rng: np.random.Generator) -> State:
        layout = task_model.sample_layout(rng)
        state = State(layout.qpos, layout.fixture_pos, layout.fixture_quat)
        for joint in range(self.model.njnt):
            # Drawers and knobs anywhere between closed and beyond open.
            name = self.model.joint(joint).name
            if any(name.startswith(fixture) for fixture in task_model.fixtures):
                low, high = self.model.jnt_range[joint]
                state.qpos[self.model.jnt_qposadr[joint]] = rng.uniform(low, high)
        return state

    def _place(self, predicate: Predicate, state: State, rng: np.random.Generator) -> None:
        address = self.model.jnt_qposadr[self.model.body_jntadr[predicate.body]]
        state.qpos[address + 3 : address + 7] = _turn(rng)
        self.show(state)
        if predicate.kind == ON_OBJECT:
            target, reach = self.data.xpos[predicate.target_body].copy(), np.array([0.03, 0.03, 0])
        else:
            target = self.data.site_xpos[predicate.site].copy()
            reach = np.abs(self.data.site_xmat[predicate.site].reshape(3, 3) @ predicate.size)
        offset = rng.uniform(-1.15, 1.15, 3) * reach
        if predicate.kind == IN_SITE:
            state.qpos[address : address + 3] = target + offset
            return
        offset[2] = rng.uniform(-0.03, 0.13)
        state.qpos[address : address + 3] = target + offset
        if predicate.target_geoms is not None and rng.random() < 0.7:
            self._lower(predicate, state, int(address) + 2, float(target[2]))

    def _lower(self, predicate: Predicate, state: State, height: int, floor: float) -> None:
        """Lower an object in small steps until it touches its target."""
        z = floor + 0.12
        for step in (0.01, 0.001):
            while z > floor - 0.02:
                state.qpos[height] = z
                if predicate.contact(self.show(state)):
                    break
                z -= step
            z += step if step > 0.001 else 0.0


def _turn(rng: np.random.Generator) -> np.ndarray:
    """Draw an orientation: upright and turned, or tumbled in a quarter of the cases."""
    if rng.random() < 0.25:
        quat = rng.normal(size=4)
        return quat / np.linalg.norm(quat)
    angle = rng.uniform(-np.pi, np.pi)
    return np.array([np.cos(angle / 2), 0.0, 0.0, np.sin(angle / 2)])


def compare_with_upstream(
    upstream: Upstream,
    models: Sequence[TaskModel],
    own: Sequence[Sequence[State]],
    further: Sequence[Predicate] = (),
) -> dict[str, tuple[int, int]]:
    """Judge states of all tasks of a scene by both codes, which must agree.

    Args:
        upstream: Its process, with the assets of the models.
        models: Of the scene's tasks.
        own: States around the goal of each task.
        further: Predicates of no task's goal.

    Returns:
        For each task, how many of its own states meet its goal, and how many do not.
    """
    assert len({m.scene_key for m in models}) == 1
    maker, flat = StateMaker(models[0]), [state for states in own for state in states]
    predicates = {p.text: p for p in (*(p for m in models for p in m.goal), *further)}
    ours, goals = [], []
    for state in flat:
        view = maker.show(state)
        ours.append([evaluate_goal((p,), view) for p in predicates.values()])
        goals.append([evaluate_goal(m.goal, view) for m in models])
    request = {
        "qpos": np.array([s.qpos for s in flat]),
        "fixture_pos": np.array([s.fixture_pos for s in flat]),
        "fixture_quat": np.array([s.fixture_quat for s in flat]),
        "fixtures": models[0].fixtures,
        "goals": [text.split() for text in predicates],
    }
    theirs = upstream.ask(models[0].task.suite, models[0].task.task_id, request)["holds"]
    differing = np.argwhere(np.array(ours) != theirs)
    texts = list(predicates)
    assert len(differing) == 0, [(int(s), texts[p]) for s, p in differing[:5]]
    # A goal is the conjunction of its predicates, in upstream's verdicts as in ours.
    columns = [[texts.index(p.text) for p in m.goal] for m in models]
    whole = np.stack([theirs[:, c].all(axis=1) for c in columns], axis=1)
    assert np.array_equal(whole, np.array(goals))
    counts, start = {}, 0
    for column, (m, states) in enumerate(zip(models, own, strict=True)):
        verdicts = whole[start : start + len(states), column]
        counts[m.task.key] = (int(verdicts.sum()), int((~verdicts).sum()))
        start += len(states)
    return counts
