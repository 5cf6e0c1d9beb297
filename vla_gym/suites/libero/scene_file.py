"""What ``scene.json`` of a compiled scene holds, for :func:`vla_gym.outside.read_json`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct

from vla_gym.outside import Size
from vla_gym.suites.libero.layouts import Placement
from vla_gym.suites.libero.spec import RobotSpec, SiteIndicator

Index = Annotated[int, Meta(ge=0, le=2**24)]
Comparison = Literal["<", "<=", ">", ">="]


class SceneObject(Struct, frozen=True):
    """A movable object or a fixture.

    Attributes:
        is_fixture: Fixtures have no free joint; their pose is written into the model.
        body: Name of the root body in the compiled model, e.g. ``"akita_black_bowl_1_main"``.
        joints: Joint names in upstream's order.
        joint_qpos: Their addresses in qpos; of a free joint the first.
        body_id: Id of the root body.
        contact_geom_ids: Ids of the geoms that upstream's ``check_contact`` looks at.
        joint_rules: See ``compile_goal``.
    """

    is_fixture: bool
    body: str
    body_id: Index
    joints: tuple[str, ...]
    joint_qpos: list[Index]
    contact_geom_ids: list[Index]
    joint_rules: dict[str, tuple[Comparison, float]]


class SceneSite(Struct):
    """A region."""

    id: Index
    size: Annotated[list[float], Meta(min_length=3, max_length=3)]
    parent: str | None
    joint_qpos: list[Index]


class JointStart(Struct):
    """Joints that start at a random position."""

    joint_qpos: list[Index]
    low: float
    high: float


class TaskStart(Struct):
    """Goal and start of one task."""

    goal: list[Annotated[list[str], Meta(min_length=1)]]
    placements: tuple[Placement, ...]
    joint_inits: list[JointStart]


class SceneFile(Struct):
    """The whole.

    Raises:
        CompileError: If numbers do not fit each other.
    """

    nq: Size
    nv: Size
    robot: RobotSpec
    objects: dict[str, SceneObject]
    sites: dict[str, SceneSite]
    indicators: tuple[SiteIndicator, ...]
    reset_qpos: np.ndarray
    tasks: dict[str, TaskStart]
    clutter: dict[str, str] = {}

    def __post_init__(self) -> None:
        """Check that what is addressed is there."""
        robot = self.robot
        tables: list[Any] = [*self.objects.values(), *self.sites.values(), *self.indicators]
        tables += [joints for start in self.tasks.values() for joints in start.joint_inits]
        slides = [s[0] for t in self.tasks.values() for p in t.placements for s in p.slides]
        addressed = [table.joint_qpos for table in tables] + [robot.joint_qpos, robot.gripper_qpos]
        for limit, what in ((self.nq, [*addressed, slides]), (self.nv, [robot.joint_qvel])):
            for addresses in what:
                array = np.asarray(addresses, None if len(addresses) else int)
                if array.dtype.kind != "i" or not ((array >= 0) & (array < limit)).all():
                    raise ValueError(f"Addresses {addresses} are not all in 0..{limit - 1}")
        if self.reset_qpos.shape != (self.nq,):
            raise ValueError(f"There are not {self.nq} numbers in reset_qpos")
