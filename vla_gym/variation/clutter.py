"""Where clutter may stand: on the table, seen by the camera, in nobody's way.

A place depends on the task alone, not on the episode's layout: clutter keeps clear of every region
that objects start in or are brought to, of the objects of all official states, and of fixtures
with their doors and drawers open. It neither hides any of them from the agent's camera.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np

from vla_gym.suites.libero.model import TaskModel
from vla_gym.variation.drawn import AGENT_CAMERA, CLUTTER_KINDS, MAX_DISTRACTORS

# Metres between clutter and what it keeps clear of: a finger fits in between, with room to spare.
CLEARANCE = 0.03
# The same around regions that something may be put down in (half an object), around the robot's
# base and around its hand at the start.
_REGION_MARGIN, _BASE_MARGIN, _HAND_MARGIN = 0.06, 0.30, 0.08
_ROUNDING = 1.02  # corners of a polygon with 16 sides lie so far outside of the circle in it
_STEP = 0.02  # of the grid of places, in metres
_IN_VIEW = 0.95  # its middle, of half the image
_PLANE_REACH = 0.8  # how much of an endless floor counts as table, in metres
_CORNERS = np.array(np.meshgrid([-1, 1], [-1, 1], [-1, 1])).reshape(3, 8).T  # of a cube
_SUPPORT_SLACK = 0.06  # of the height at which BDDL files and models put the table's top


@dataclass(frozen=True)
class ClutterSize:
    """Measures of one kind of clutter in metres.

    Attributes:
        radius: Farthest that it reaches sideways.
        height: From the table to its top.
        height_of_origin: Its body's z when it stands.
    """

    radius: float
    height: float
    height_of_origin: float


@dataclass(frozen=True)
class ClutterPlaces:
    """Places in one task.

    Attributes:
        sizes: By category.
        places: (n, 2) grid points where each category may stand.
    """

    sizes: dict[str, ClutterSize]
    places: dict[str, np.ndarray]

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Return float64 (MAX_DISTRACTORS, 4): kind (-1: none), x, y in metres, turn in degrees.

        Args:
            count: How many; fewer where there is no room for more.
            rng: Source of all randomness.
        """
        rows = np.zeros((MAX_DISTRACTORS, 4))
        rows[:, 0] = -1.0
        placed: list[tuple[np.ndarray, float]] = []
        names = list(self.places)
        for index in rng.permutation(len(names)).tolist():
            # Drawn in any case: more clutter leaves the first pieces as they are.
            u, jitter = rng.random(), rng.uniform(-_STEP / 2, _STEP / 2, 2)
            yaw = rng.uniform(-180, 180)
            if len(placed) == count:
                break
            name = names[index]
            free, radius = self.places[name], self.sizes[name].radius
            for other, reach in placed:
                apart = np.linalg.norm(free - other, axis=1)
                free = free[apart > radius + reach + CLEARANCE + _STEP]
            if not len(free):
                continue
            position = free[int(u * len(free))] + jitter
            rows[len(placed)] = CLUTTER_KINDS.index(name), *position, yaw
            placed.append((position, radius))
        return rows


def geom_points(model: mujoco.MjModel, geom: int) -> np.ndarray:
    """Return points (K, 3) in a geom's frame whose convex hull is the geom, or a little more."""
    size, kind = model.geom_size[geom], model.geom_type[geom]
    if kind == mujoco.mjtGeom.mjGEOM_MESH:
        mesh = model.geom_dataid[geom]
        first = model.mesh_vertadr[mesh]
        return np.asarray(model.mesh_vert[first : first + model.mesh_vertnum[mesh]], np.float64)
    angles = np.arange(16) * (np.pi / 8)
    circle = np.column_stack([np.cos(angles), np.sin(angles)]) * _ROUNDING
    if kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
        ends = [np.column_stack([circle * size[0], np.full(16, z)]) for z in (-size[1], size[1])]
        return np.concatenate(ends)
    if kind == mujoco.mjtGeom.mjGEOM_ELLIPSOID:
        rings = [
            np.column_stack([circle * np.cos(t), np.full(16, np.sin(t))])
            for t in np.linspace(-np.pi / 2, np.pi / 2, 9)
        ]
        return np.asarray(np.concatenate(rings) * size)
    half = model.geom_aabb[geom, 3:]  # a box, or the box around what is not
    return np.asarray(model.geom_aabb[geom, :3] + _CORNERS * half)


class ClutterSurvey:
    """Measures a task whose model is without any variation: what is where, what the camera sees."""

    def __init__(self, model: mujoco.MjModel, task_model: TaskModel) -> None:
        self._model, self._task = model, task_model
        self._data = mujoco.MjData(model)
        if len(task_model.init_states):
            layout = task_model.official_layout(0)
        else:
            layout = task_model.sample_layout(np.random.default_rng(0))
        for name, pos, quat in zip(
            task_model.fixtures, layout.fixture_pos, layout.fixture_quat, strict=True
        ):
            body = model.body(task_model.objects[name].body).id
            model.body_pos[body], model.body_quat[body] = pos, quat
        self._data.qpos[:] = layout.qpos
        mujoco.mj_kinematics(model, self._data)
        mujoco.mj_comPos(model, self._data)
        mujoco.mj_camlight(model, self._data)
        self._origin = next(p.reference_pos for p in task_model.placements if p.reference is None)
        self._low, self._high, self._table = self._support()

    def places(self) -> ClutterPlaces:
        """Return where clutter may stand."""
        blocked = np.array([*self._starts().values(), *self._regions(), *self._robot()])
        sizes = {kind: self._size(body) for kind, body in self._task.clutter.items()}
        x, y = (np.arange(self._low[k], self._high[k], _STEP) for k in (0, 1))
        grid = np.stack(np.meshgrid(x, y, indexing="ij"), axis=-1).reshape(-1, 2)
        places = {kind: grid[self._fits(grid, size, blocked)] for kind, size in sizes.items()}
        return ClutterPlaces(sizes, places)

    def _points(self, body: str, *, seen: bool = True) -> np.ndarray:
        """Return points (K, 3) around a body, drawers and doors included.

        They are of geoms that are only seen, too, or of those alone that collide.
        """
        model, data = self._model, self._data
        below = model.body_rootid[model.geom_bodyid] == model.body(body).id
        if not seen:
            below &= (model.geom_contype != 0) | (model.geom_conaffinity != 0)
        parts = [
            data.geom_xpos[geom] + geom_points(model, geom) @ data.geom_xmat[geom].reshape(3, 3).T
            for geom in np.flatnonzero(below).tolist()
        ]
        return np.concatenate(parts)

    def _size(self, body: str) -> ClutterSize:
        origin = self._data.body(body).xpos
        points, solid = self._points(body) - origin, self._points(body, seen=False) - origin
        bottom = float(solid[:, 2].min())
        return ClutterSize(
            radius=float(np.linalg.norm(points[:, :2], axis=1).max()),
            height=float(points[:, 2].max()) - bottom,
            height_of_origin=self._table - bottom,
        )

    def _support(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Return low and high corner (2,) of the table's top, and its height."""
        model, data = self._model, self._data
        low, high, best = self._origin[:2], self._origin[:2], -np.inf
        owned = {model.body(spec.body).id for spec in self._task.objects.values()}
        for geom in range(model.ngeom):
            body = int(model.geom_bodyid[geom])
            if not model.geom_contype[geom] or model.body_weldid[body] != 0:
                continue
            if int(model.body_rootid[body]) in owned:
                continue
            kind, pos = model.geom_type[geom], data.geom_xpos[geom]
            if kind == mujoco.mjtGeom.mjGEOM_PLANE:
                corners = np.array([[-1.0, -1.0, 0.0], [1.0, 1.0, 0.0]]) * _PLANE_REACH
                corners = corners + [*self._origin[:2], pos[2]]
            elif kind == mujoco.mjtGeom.mjGEOM_BOX:
                mat = data.geom_xmat[geom].reshape(3, 3)
                corners = pos + (_CORNERS * model.geom_size[geom]) @ mat.T
            else:
                continue
            bottom, top = corners.min(axis=0), corners.max(axis=0)
            under = (bottom[:2] <= self._origin[:2]).all() and (self._origin[:2] <= top[:2]).all()
            if under and best < top[2] <= self._origin[2] + _SUPPORT_SLACK:
                low, high, best = bottom[:2], top[:2], float(top[2])
        return low, high, best

    def _starts(self) -> dict[str, np.ndarray]:
        """Return the rectangle that each object or fixture may cover at the start."""
        found: dict[str, np.ndarray] = {}
        states = self._task.init_states
        for placement in self._task.placements:
            spec = self._task.objects[placement.name]
            reach = self._reach(spec)
            if placement.reference is None:
                x, y = placement.x_ranges, placement.y_ranges
                region = np.array([x.min(), x.max(), y.min(), y.max()])
                region += np.repeat(placement.reference_pos[:2], 2)
            else:
                region = found[placement.reference].copy()
            if not spec.is_fixture and len(states):
                address = 1 + self._task.free_qpos[placement.name]
                xy = states[:, address : address + 2]
                region[[0, 2]] = np.minimum(region[[0, 2]], xy.min(0))
                region[[1, 3]] = np.maximum(region[[1, 3]], xy.max(0))
            if placement.site_pos is None or not placement.reference:
                region = region + reach
            found[placement.name] = region
        return found

    def _reach(self, spec: Any) -> np.ndarray:
        """Return how far something reaches beyond its origin: low x, high x, low y, high y."""
        model, data = self._model, self._data
        if not spec.is_fixture:  # it may be turned
            away = self._points(spec.body) - data.body(spec.body).xpos
            radius = float(np.linalg.norm(away[:, :2], axis=1).max())
            return np.array([-radius, radius, -radius, radius])
        parts, kept = [], data.qpos.copy()
        for end in (0, 1):
            for joint in (model.joint(name) for name in spec.joints):
                data.qpos[joint.qposadr[0]] = joint.range[end]
            mujoco.mj_kinematics(model, data)
            parts.append(self._points(spec.body) - data.body(spec.body).xpos)
        data.qpos[:] = kept
        mujoco.mj_kinematics(model, data)
        low, high = np.concatenate(parts).min(axis=0), np.concatenate(parts).max(axis=0)
        return np.array([low[0], high[0], low[1], high[1]])

    def _regions(self) -> list[np.ndarray]:
        """Return the BDDL file's regions on the table, where things start or are put down."""
        found = []
        targets = {name for name, _ in self._task.task.problem.fixtures}
        targets -= set(self._task.objects)  # what is left is the table or floor itself
        for _, *fields in self._task.task.problem.regions:
            region = {field[0]: field[1:] for field in fields}
            if ":ranges" in region and region[":target"][0] in targets:
                for x0, y0, x1, y1 in region[":ranges"][0]:
                    sides = np.array([x0, x1, y0, y1], dtype=float)
                    sides += np.repeat(self._origin[:2], 2)
                    found.append(sides + _REGION_MARGIN * np.array([-1, 1, -1, 1]))
        return found

    def _robot(self) -> list[np.ndarray]:
        """Return squares around the robot's base and its hand."""
        base = self._data.body("robot0_base").xpos
        hand = self._data.site(self._task.robot.eef_site).xpos
        margins = ((base, _BASE_MARGIN), (hand, _HAND_MARGIN))
        return [np.array([p[0] - m, p[0] + m, p[1] - m, p[1] + m], dtype=float) for p, m in margins]

    def _fits(self, grid: np.ndarray, size: ClutterSize, blocked: np.ndarray) -> np.ndarray:
        """Tell at which points (n, 2) clutter of a size may stand."""
        model, reach = self._model, size.radius + CLEARANCE + _STEP
        fits: np.ndarray = np.all(
            (grid > self._low + size.radius + _STEP) & (grid < self._high - size.radius - _STEP), 1
        )
        fits &= (_distances(grid, blocked) > reach).all(axis=1)
        camera = model.camera(AGENT_CAMERA).id
        eye, mat = self._data.cam_xpos[camera], self._data.cam_xmat[camera].reshape(3, 3)
        # In view with its foot and its top, whichever side it is seen from.
        tangent = np.tan(np.radians(model.cam_fovy[camera]) / 2)
        for height in (0.0, size.height):
            ray = (np.column_stack([grid, np.full(len(grid), self._table + height)]) - eye) @ mat
            edge = _IN_VIEW * tangent * -ray[:, 2]
            fits &= (np.abs(ray[:, :2]) < edge[:, None]).all(axis=1)
        # What it hides is a strip of table from its foot to the shadow that the camera, were it a
        # lamp, would make of its top.
        above = eye[2] - self._table
        longer = above / max(above - size.height, 0.05)
        for share in np.linspace(0.0, 1.0, 6):
            stretch = 1.0 + share * (longer - 1.0)
            point = eye[:2] + (grid - eye[:2]) * stretch
            fits &= (_distances(point, blocked) > size.radius * stretch + _STEP).all(axis=1)
        return fits


def _distances(points: np.ndarray, rectangles: np.ndarray) -> np.ndarray:
    """Return the distances (n, m) of points (n, 2) from rectangles (m, 4)."""
    low, high = rectangles[:, [0, 2]], rectangles[:, [1, 3]]
    away = np.maximum(np.maximum(low - points[:, None], points[:, None] - high), 0.0)
    return np.asarray(np.linalg.norm(away, axis=2))
