"""The appearance of a scene in the shared model: lights, cameras, colours and clutter.

An appearance holds complete arrays, made once when a variation is set. Showing it copies them into
the model, which costs microseconds and nothing at all while the model shows it already. Without
any variation the model is never touched.
"""

from __future__ import annotations

import mujoco
import numpy as np

from vla_gym.errors import ConfigError
from vla_gym.suites.libero.model import TaskModel
from vla_gym.variation.clutter import ClutterSize
from vla_gym.variation.drawn import (
    AGENT_CAMERA,
    CLUTTER_KIND,
    CLUTTER_KINDS,
    CLUTTER_X,
    CLUTTER_Y,
    CLUTTER_YAW,
    MAX_OBJECTS,
    WRIST_CAMERA,
    part,
)

_HIDDEN_GROUP = 0  # of geoms that no renderer draws, as for collisions
_ROBOT_ROOT = "robot0_base"
# MuJoCo takes a geom of exactly this colour for one without, and draws its material's.
_UNSET_COLOUR = np.array([0.5, 0.5, 0.5, 1.0], np.float32)
_FIELDS = (
    "light_pos",
    "light_dir",
    "light_diffuse",
    "light_ambient",
    "light_specular",
    "cam_pos",
    "cam_quat",
    "cam_fovy",
    "geom_rgba",
    "geom_group",
)
_HEADLIGHT = ("ambient", "diffuse", "specular")  # of the light at the camera


#: How one simulation looks: arrays of the model, of its light at the camera, and of the bodies from
#: the first clutter on, by name; never changed.
Appearance = dict[str, np.ndarray]


class ModelAppearance:
    """What a shared model looks like now, and without any variation; its lock is held.

    Attributes:
        fields: Its appearance without variation.
        clutter: Bodies of the clutter, the last ones of the model.
        shown: The appearance that the model shows; None: its own.
        roots: Body that each geom hangs on and that stands in the world itself.
        paint: Entry of :func:`_palette` that each geom is painted with, or -1.
        colours: (ngeom, 4) as they are seen.
    """

    def __init__(self, model: mujoco.MjModel, task_model: TaskModel) -> None:
        """Remember a model as it is; any task of the scene will do."""
        self._views = {name: getattr(model, name) for name in _FIELDS}
        self._views |= {name: getattr(model.vis.headlight, name) for name in _HEADLIGHT}
        bodies = task_model.clutter.values()
        self.clutter = np.array([model.body(name).id for name in bodies], np.int64)
        first = self.clutter.min(initial=model.nbody)
        self._views |= {name: getattr(model, name)[first:] for name in ("body_pos", "body_quat")}
        self.fields: Appearance = {name: view.copy() for name, view in self._views.items()}
        self.shown: Appearance | None = None
        self.roots = model.body_rootid[model.geom_bodyid]
        self.paint = _paint(model, self.roots, task_model)
        # A geom without a colour of its own has its material's.
        self.colours = self.fields["geom_rgba"].copy()
        material = np.asarray(model.geom_matid)
        unset = (material >= 0) & (self.colours == _UNSET_COLOUR).all(axis=1)
        self.colours[unset] = model.mat_rgba[material[unset]]

    def show(self, appearance: Appearance | None) -> None:
        """Write an appearance into the model; None for its own."""
        if appearance is self.shown:
            return
        source = self.fields if appearance is None else appearance
        for name, view in self._views.items():
            view[:] = source[name]
        self.shown = appearance


def make_appearance(
    plain: ModelAppearance,
    model: mujoco.MjModel,
    task_model: TaskModel,
    vector: np.ndarray,
    sizes: dict[str, ClutterSize],
) -> Appearance:
    """Return how a task looks with a variation, see ``DomainVariation.describe``.

    Raises:
        ConfigError: If it has clutter that the scene lacks.
    """
    appearance = {name: array.copy() for name, array in plain.fields.items()}
    _light(appearance, vector)
    for camera, prefix in ((AGENT_CAMERA, "camera"), (WRIST_CAMERA, "wrist")):
        index = model.camera(camera).id
        appearance["cam_pos"][index] += part(vector, f"{prefix}_position")
        turn = np.radians(part(vector, f"{prefix}_rotation"))
        quat, own = np.empty(4), plain.fields["cam_quat"][index]
        if turn.any():
            angle = float(np.linalg.norm(turn))
            mujoco.mju_axisAngle2Quat(quat, turn / angle, angle)
            mujoco.mju_mulQuat(appearance["cam_quat"][index], own, quat)
    appearance["cam_fovy"][model.camera(AGENT_CAMERA).id] += float(part(vector, "camera_fov"))
    _surfaces(appearance, plain, vector)
    _clutter(appearance, plain, task_model, vector, sizes)
    return appearance


def _light(appearance: Appearance, vector: np.ndarray) -> None:
    colour = part(vector, "light_intensity") * part(vector, "light_color")
    for name in ("light_diffuse", "light_ambient", "light_specular", *_HEADLIGHT):
        appearance[name] *= colour.astype(appearance[name].dtype)
    angle = float(np.radians(part(vector, "light_turn")))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    for name in ("light_pos", "light_dir"):
        if angle:
            appearance[name][:, :2] = appearance[name][:, :2] @ turn.T


def _palette(vector: np.ndarray) -> np.ndarray:
    """Return float64 (MAX_OBJECTS + 3, 4): colours and weights of objects, table, floor, walls."""
    palette = np.empty((MAX_OBJECTS + 3, 4))
    palette[:MAX_OBJECTS, :3] = part(vector, "object_colors")
    palette[:MAX_OBJECTS, 3] = part(vector, "object_weight")
    for number, name in enumerate(("table_color", "floor_color", "wall_color")):
        palette[MAX_OBJECTS + number] = part(vector, name)
    return palette


def _paint(model: mujoco.MjModel, roots: np.ndarray, task_model: TaskModel) -> np.ndarray:
    """Return which entry of the palette each geom is painted with, or -1."""
    table, floor, wall = range(MAX_OBJECTS, MAX_OBJECTS + 3)
    of_body = {
        model.body(spec.body).id: number % MAX_OBJECTS
        for number, spec in enumerate(task_model.objects.values())
    }
    of_body |= {model.body(name).id: -1 for name in (*task_model.clutter.values(), _ROBOT_ROOT)}
    paint = np.empty(model.ngeom, np.int64)
    for geom, root in enumerate(roots.tolist()):
        if root in of_body:
            paint[geom] = of_body[root]
        elif "table" in model.body(root).name:
            paint[geom] = table
        else:
            plane = model.geom_type[geom] == mujoco.mjtGeom.mjGEOM_PLANE
            paint[geom] = floor if plane else wall
    paint[np.asarray(model.geom_group) == _HIDDEN_GROUP] = -1
    return paint


def _surfaces(appearance: Appearance, plain: ModelAppearance, vector: np.ndarray) -> None:
    """Tint what is seen; a texture is multiplied by its geom's colour."""
    colour = _palette(vector)[plain.paint]
    chosen = (plain.paint >= 0) & (colour[:, 3] > 0)
    own, colour = plain.colours[chosen], colour[chosen]
    mixed = own.copy()
    mixed[:, :3] = (1.0 - colour[:, 3:]) * own[:, :3] + colour[:, 3:] * colour[:, :3]
    mixed[(mixed == _UNSET_COLOUR).all(axis=1), 0] += 0.002
    appearance["geom_rgba"][chosen] = mixed


def _clutter(
    appearance: Appearance,
    plain: ModelAppearance,
    task_model: TaskModel,
    vector: np.ndarray,
    sizes: dict[str, ClutterSize],
) -> None:
    """Put clutter where it stands and hide the rest of it."""
    group = appearance["geom_group"]
    bodies = list(task_model.clutter)
    group[np.isin(plain.roots, plain.clutter)] = _HIDDEN_GROUP
    for row in part(vector, "distractors"):
        kind = int(row[CLUTTER_KIND])
        if kind < 0:
            continue
        name = CLUTTER_KINDS[kind]
        if name not in sizes:
            raise ConfigError(
                f"The variation has {name} as clutter, the scene {task_model.scene_key!r} has "
                f"{bodies or 'none'}: it comes from another task, or from an environment whose "
                "variation had distractors."
            )
        body, half = plain.clutter[bodies.index(name)], np.radians(row[CLUTTER_YAW]) / 2
        place = row[CLUTTER_X], row[CLUTTER_Y], sizes[name].height_of_origin
        appearance["body_pos"][body - plain.clutter[0]] = place
        appearance["body_quat"][body - plain.clutter[0]] = np.cos(half), 0.0, 0.0, np.sin(half)
        shown = plain.roots == body
        group[shown] = plain.fields["geom_group"][shown]
