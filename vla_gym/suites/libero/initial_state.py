"""Reads how a task begins out of upstream's environment: placements and joints, as JSON-ready data.

Runs in the compile process only. Tasks of one scene may begin differently; all are read from one
environment, whose samplers upstream's own code makes anew for each ``:init`` section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_gym.errors import CompileError
from vla_gym.suites.libero.extract import joint_addresses, reset_qpos

_ORIENTATIONS = ("axisangle", "xyaxes", "zaxis", "euler")


def tables(env: Any, model: Any, problem: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the start of one task.

    Args:
        env: Upstream's environment, of any task of the scene.
        model: The compiled model.
        problem: The task's BDDL file, parsed by upstream.

    Returns:
        ``placements`` (keys as in ``Placement``) and ``joint_inits``.

    Raises:
        CompileError: If the task places objects in a way that is not supported.
    """
    env.parsed_problem["initial_state"] = problem["initial_state"]
    env.object_property_initializers = []
    env._setup_placement_initializer(None)
    return {
        "placements": _placement_tables(env, model),
        "joint_inits": _joint_init_tables(env, model),
    }


def _placement_tables(env: Any, model: Any) -> list[dict[str, Any]]:
    """Describe upstream's placement samplers in the order in which they draw."""
    composites = (
        env.placement_initializer,
        env.conditional_placement_initializer,
        env.conditional_placement_on_objects_initializer,
    )
    found = []
    for composite in composites:
        for name, sampler in composite.samplers.items():
            arguments = composite.sample_args[name] or {}
            for obj in sampler.mujoco_objects:
                table = _placement(sampler, obj, obj.name in env.fixtures_dict)
                found.append(table | _reference(env, model, sampler, arguments))
    return found


def _placement(sampler: Any, obj: Any, is_fixture: bool) -> dict[str, Any]:
    rotation = sampler.rotation
    if isinstance(rotation, Mapping):
        rotation = {axis: [float(min(v)), float(max(v))] for axis, v in rotation.items()}
    elif rotation is not None:
        values = np.atleast_1d(np.asarray(rotation, dtype=np.float64))
        rotation = [float(values.min()), float(values.max())]
    init_quat = getattr(obj, "init_quat", None)
    # All samplers but the plain one, which places fixtures, build (x, y, z, w).
    scalar_last = type(sampler).__name__ != "MultiRegionRandomSampler"
    inside = type(sampler).__name__ == "InSiteRegionRandomSampler"  # it takes the radius for 0
    return {
        "name": obj.name,
        "is_fixture": is_fixture,
        "x_ranges": np.asarray(sampler.x_ranges, dtype=np.float64).tolist(),
        "y_ranges": np.asarray(sampler.y_ranges, dtype=np.float64).tolist(),
        "reference_pos": [float(v) for v in sampler.reference_pos],
        "z_offset": float(sampler.z_offset),
        "rotation": rotation,
        "rotation_axis": sampler.rotation_axis,
        "scalar_last": scalar_last,
        "keep_inside": bool(sampler.ensure_object_boundary_in_range) and not inside,
        "avoid_overlap": bool(sampler.ensure_valid_placement),
        "radius": float(obj.horizontal_radius),
        "bottom": float(obj.bottom_offset[-1]),
        "top": float(obj.top_offset[-1]),
        "init_quat": None if init_quat is None else np.asarray(init_quat, float).tolist(),
    }


def _reference(env: Any, model: Any, sampler: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Describe what a placement is relative to, if that is another object."""
    name = arguments.get("reference")
    if name is None:
        return {}
    reference = env.get_object(name)
    inside = type(sampler).__name__ == "InSiteRegionRandomSampler"
    table: dict[str, Any] = {"reference": name}
    table["lift"] = 0.0 if inside else float(reference.top_offset[-1])
    if "site_name" in arguments:
        if name not in env.fixtures_dict:
            raise CompileError(
                f"An object starts on {arguments['site_name']!r}, which belongs to the movable "
                f"{name!r}: expected a site of a fixture."
            )
        table |= _site(env, model, reference, arguments["site_name"])
    return table


def _site(env: Any, model: Any, fixture: Any, name: str) -> dict[str, Any]:
    """Describe a site as upstream's samplers see it: its fixture stands where its file says.

    Upstream reads the site from a model that was just compiled, after it has moved the joints.
    """
    import mujoco  # noqa: PLC0415 - the compile process imports it after libero

    root, data = model.body(fixture.root_body).id, mujoco.MjData(model)
    kept = model.body_pos[root].copy(), model.body_quat[root].copy()
    model.body_pos[root], model.body_quat[root] = _pose_in_file(env, fixture.root_body)
    data.qpos[:] = reset_qpos(env, model)
    mujoco.mj_kinematics(model, data)
    model.body_pos[root], model.body_quat[root] = kept
    site = model.site(name).id
    position, slides, body = data.site_xpos[site].copy(), [], int(model.site_bodyid[site])
    while body not in (0, root):
        first = int(model.body_jntadr[body])
        for joint in range(first, first + int(model.body_jntnum[body])):
            if model.jnt_type[joint] != mujoco.mjtJoint.mjJNT_SLIDE:
                raise CompileError(f"Site {name!r} turns with a joint, which is not supported.")
            address, axis = int(model.jnt_qposadr[joint]), data.xaxis[joint].copy()
            position -= data.qpos[address] * axis
            slides.append([address, axis.tolist()])
        body = int(model.body_parentid[body])
    return {"site_pos": position.tolist(), "slides": slides}


def _pose_in_file(env: Any, body: str) -> tuple[np.ndarray, np.ndarray]:
    """Return position and quaternion of a body in upstream's MJCF."""
    element = next(e for e in env.model.worldbody.iter("body") if e.get("name") == body)
    if any(element.get(key) for key in _ORIENTATIONS):
        raise CompileError(f"Body {body!r} is not turned by a quaternion, which is not supported.")
    pos, quat = element.get("pos") or "0 0 0", element.get("quat") or "1 0 0 0"
    return np.array(pos.split(), dtype=float), np.array(quat.split(), dtype=float)


def _joint_init_tables(env: Any, model: Any) -> list[dict[str, Any]]:
    """Describe joints that ``:init`` opens, closes or turns on."""
    found: list[dict[str, Any]] = []
    for sampler in env.object_property_initializers:
        owner = env.object_sites_dict.get(sampler.name)
        if owner is None:
            owner = env.get_object(env.object_states_dict[sampler.name].object_name)
        low, high = sampler.joint_ranges
        addresses = joint_addresses(model, owner.joints)
        found.append({"joint_qpos": addresses, "low": float(low), "high": float(high)})
    return found
