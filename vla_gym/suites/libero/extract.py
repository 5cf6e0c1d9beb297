"""Reads everything that a TaskModel needs out of upstream's environment, as JSON-ready data.

Runs in the compile process only. All figures but one (the reset noise) are taken from upstream's
own objects. ``model`` is the compiled ``mujoco.MjModel`` that is going to be saved: every name
is resolved in it, since it may differ from the one upstream holds (low-poly robot).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from vla_gym.errors import CompileError

# Predicate name, method of upstream's object, and the range whose ends may be its threshold.
_JOINT_RULES = {
    "open": ("is_open", "default_open_ranges"),
    "close": ("is_close", "default_close_ranges"),
    "turnon": ("turn_on", "default_turnon_ranges"),
    "turnoff": ("turn_off", "default_turnoff_ranges"),
}


def robot_table(env: Any, model: Any) -> dict[str, Any]:
    """Describe the arm, the gripper and the controller; keys as in ``RobotSpec``."""
    robot = env.robots[0]
    controller, gripper = robot.controller, robot.gripper
    arm = robot.robot_model
    low, high = (np.asarray(v) for v in robot.torque_limits)
    fingers = [int(model.actuator(name).id) for name in gripper.actuators]
    finger_range = np.asarray(model.actuator_ctrlrange)[fingers]
    scale, kp = np.asarray(controller.output_max), np.asarray(controller.kp)
    if not (_constant(kp) and _constant(scale[:3]) and _constant(scale[3:])):
        raise CompileError("Upstream's controller gains differ per axis, which is not supported.")
    critical = 2 * np.sqrt(kp)
    return {
        "eef_site": controller.eef_name,
        "joint_qpos": joint_addresses(model, arm.joints),
        "joint_qvel": [int(model.joint(name).dofadr[0]) for name in arm.joints],
        "joint_actuators": [int(model.actuator(name).id) for name in arm.actuators],
        "gripper_qpos": joint_addresses(model, gripper.joints),
        "gripper_actuators": fingers,
        "torque_low": low.tolist(),
        "torque_high": high.tolist(),
        "gripper_bias": (0.5 * (finger_range[:, 1] + finger_range[:, 0])).tolist(),
        "gripper_weight": (0.5 * (finger_range[:, 1] - finger_range[:, 0])).tolist(),
        "gripper_speed": float(gripper.speed),
        "init_qpos": np.asarray(robot.init_qpos).tolist(),
        # robosuite's default, with which LIBERO's official states were made; ControlEnv itself
        # switches the noise off because an official state follows.
        "init_noise": 0.02,
        "kp": float(kp[0]),
        "damping_ratio": float(np.asarray(controller.kd)[0] / critical[0]),
        "position_scale": float(scale[0]),
        "rotation_scale": float(scale[3]),
        "substeps": int(env.control_timestep / env.model_timestep),
    }


def object_tables(env: Any, model: Any) -> dict[str, dict[str, Any]]:
    """Describe movable objects, then fixtures, by instance name."""
    tables = {}
    for name, obj in [*env.objects_dict.items(), *env.fixtures_dict.items()]:
        tables[name] = {
            "is_fixture": name in env.fixtures_dict,
            "body": obj.root_body,
            "body_id": int(model.body(obj.root_body).id),
            "joints": list(obj.joints),
            "joint_qpos": joint_addresses(model, obj.joints),
            "contact_geom_ids": [int(model.geom(geom).id) for geom in obj.contact_geoms],
            "joint_rules": _joint_rules(obj),
        }
    return tables


def site_tables(env: Any, model: Any) -> dict[str, dict[str, Any]]:
    """Describe the regions that goals may name, by region name."""
    tables = {}
    for name, site in env.object_sites_dict.items():
        size = [float(v) for v in np.atleast_1d(site.size)]
        tables[name] = {
            "id": int(model.site(name).id),
            "size": size + [0.0] * (3 - len(size)),
            "parent": site.parent_name,
            "joint_qpos": joint_addresses(model, site.joints or ()),
        }
    return tables


def reset_qpos(env: Any, model: Any) -> np.ndarray:
    """Return qpos as upstream's reset leaves it before it places objects, without noise, (nq,)."""
    robot = env.robots[0]
    qpos = np.array(model.qpos0)
    for part in (robot.robot_model, robot.gripper):
        qpos[joint_addresses(model, part.joints)] = part.init_qpos
    return qpos


def indicator_tables(
    env: Any, model: Any, objects: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Describe sites that upstream shows while an object is on (a stove's red burner).

    Upstream toggles alpha ``a`` to ``1 - a`` whenever visibility changes; ``a`` may be negative
    (hidden by robosuite), so both values are stored.
    """
    tables = []
    for name in dict.fromkeys(env.visualization_sites_list):
        for site, _ in env.get_object(name).object_properties["vis_site_names"].values():
            index = int(model.site(site).id)
            hidden = float(model.site_rgba[index, 3])
            if hidden > 0:
                raise CompileError(f"Indicator site {site!r} is visible after reset.")
            rule = objects[name]["joint_rules"]["turnon"]
            tables.append(
                {
                    "site": site,
                    "site_id": index,
                    "joint_qpos": objects[name]["joint_qpos"],
                    "comparison": rule[0],
                    "threshold": rule[1],
                    "alpha_off": hidden,
                    "alpha_on": float(np.float32(1) - np.float32(hidden)),
                }
            )
    return tables


def _joint_rules(obj: Any) -> dict[str, tuple[str, float]]:
    properties = getattr(obj, "object_properties", {})
    ranges = properties.get("articulation", {})
    shown = dict(properties.get("vis_site_names", {}))
    rules = {}
    for predicate, (method, range_name) in _JOINT_RULES.items():
        test = getattr(obj, method, None)
        if callable(test) and len(ranges.get(range_name, ())) > 0:
            rules[predicate] = _probe(test, [float(v) for v in ranges[range_name]])
    # turn_on and turn_off also record what should be shown: undo what the probes left.
    if shown:
        properties["vis_site_names"].update(shown)
    return rules


def _probe(test: Callable[[float], bool], candidates: list[float]) -> tuple[str, float]:
    """Find which end of a range a test compares with, and how, by asking at and beside it."""
    patterns = {
        (True, False, False): "<",
        (True, True, False): "<=",
        (False, False, True): ">",
        (False, True, True): ">=",
    }
    for value in candidates:
        points = (math.nextafter(value, -math.inf), value, math.nextafter(value, math.inf))
        pattern = (bool(test(points[0])), bool(test(points[1])), bool(test(points[2])))
        if pattern in patterns:
            return patterns[pattern], value
    raise CompileError(f"No joint threshold found among {candidates} for {test}.")


def joint_addresses(model: Any, joints: Iterable[str]) -> list[int]:
    """Return the first qpos address of each joint."""
    return [int(model.joint(name).qposadr[0]) for name in joints]


def _constant(values: np.ndarray) -> bool:
    return bool(np.all(values == values[0]))
