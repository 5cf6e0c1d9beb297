"""Demonstrations in LIBERO's HDF5 layout: one episode a part file, parts joined to a task's file.

The layout is what LIBERO's ``create_dataset.py`` writes and robomimic's readers open; docs/demos.md
lists it and the few differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from msgspec import Struct

from vla_gym.errors import ConfigError
from vla_gym.files import replacing
from vla_gym.outside import Object, parse_json
from vla_gym.suites import Task
from vla_gym.suites.libero import TaskModel
from vla_gym.suites.libero.tasks import LiberoTask, suite_folder

#: LIBERO's names of our cameras, agentview then wrist.
IMAGE_KEYS = ("agentview_rgb", "eye_in_hand_rgb")
# LIBERO stores the first row at the bottom, as OpenGL has it, and says so in this attribute.
_IMAGE_CONVENTION = "opengl"
# robomimic's number of robosuite environments.
_ROBOSUITE_TYPE = 1
# Group of the one episode of a part file.
_PART = "demo"


def demo_path(output: Path, task: Task) -> Path:
    """Return where LIBERO's benchmark looks for a task's demonstrations below ``output``."""
    return output / suite_folder(task.suite) / f"{task.name}_demo.hdf5"


def parts_folder(output: Path, task: Task) -> Path:
    """Return where a task's finished attempts lie until there are enough."""
    path = demo_path(output, task)
    return path.with_name(f".{path.stem}.parts")


def part_path(folder: Path, number: int) -> Path:
    """Return the file of a successful attempt."""
    return folder / f"{number:05d}.hdf5"


def write_part(path: Path, frames: Mapping[str, np.ndarray], attributes: Mapping[str, Any]) -> None:
    """Write one successful episode to a file of its own; the file appears when it is whole.

    Args:
        path: The file.
        frames: T rows each, row t of what was there before action t: ``images`` (T, 2, S, S, 3)
            uint8, agentview then wrist; ``proprio`` (T, 8) float32; ``actions`` (T, 7) float32,
            the expert's clean ones, and ``executed_actions``, those with noise; ``states``
            (T, 1 + nq + nv): time, qpos, qvel; ``joints`` (T, 7) of the arm in radians;
            ``eef_quat`` (T, 4), the hand's orientation (x, y, z, w), as robosuite writes it.
        attributes: Further facts about the episode.
    """
    actions, states, proprio = (frames[key] for key in ("actions", "states", "proprio"))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as scratch, h5py.File(scratch, "w") as file:
        group = file.create_group(_PART)
        _write_obs(group.create_group("obs"), frames)
        last = np.zeros(len(actions), np.uint8)
        last[-1] = 1
        robot_states = [proprio[:, 6:], proprio[:, :3], frames["eef_quat"]]
        arrays = {
            "actions": actions,
            "executed_actions": frames["executed_actions"],
            "states": states,
            "robot_states": np.concatenate(robot_states, axis=1),
            "rewards": last,
            "dones": last,
        }
        for name, array in arrays.items():
            group.create_dataset(name, data=array)
        group.attrs["num_samples"] = len(actions)
        group.attrs["init_state"] = states[0]
        group.attrs.update(attributes)


def _write_obs(group: h5py.Group, frames: Mapping[str, np.ndarray]) -> None:
    for camera, name in enumerate(IMAGE_KEYS):
        images = np.ascontiguousarray(frames["images"][:, camera, ::-1])
        # A chunk a frame: training reads single frames in any order.
        group.create_dataset(
            name, data=images, chunks=(1, *images.shape[1:]), compression="gzip", compression_opts=4
        )
    proprio = frames["proprio"].astype(np.float64)
    group.create_dataset("ee_pos", data=proprio[:, :3])
    group.create_dataset("ee_ori", data=proprio[:, 3:6])
    group.create_dataset("ee_states", data=proprio[:, :6])
    group.create_dataset("gripper_states", data=proprio[:, 6:])
    group.create_dataset("joint_states", data=frames["joints"])


def join_parts(
    path: Path, parts: Sequence[Path], task_model: TaskModel, meta: Mapping[str, Any]
) -> None:
    """Write a task's file, ``demo_0``, ``demo_1``, ... in the order of ``parts``.

    Args:
        path: The file, see :func:`demo_path`; it appears when it is whole.
        parts: What :func:`write_part` wrote.
        task_model: The task.
        meta: How the demonstrations were made: JSON data, found again by :func:`read_meta`.
    """
    with replacing(path) as scratch, h5py.File(scratch, "w") as file:
        data = file.create_group("data")
        total = 0
        for number, part in enumerate(parts):
            with h5py.File(part, "r") as source:
                source.copy(_PART, data, name=f"demo_{number}")  # compressed chunks as they are
            total += int(data[f"demo_{number}"].attrs["num_samples"])
        data.attrs["num_demos"] = len(parts)
        data.attrs["total"] = total
        data.attrs.update(_task_attributes(task_model.task, meta["image_size"]))
        data.attrs["vla_gym"] = json.dumps(meta)


def _task_attributes(task: LiberoTask, image_size: int) -> dict[str, str]:
    """Return what LIBERO's files say about the task, all of it text."""
    problem = task.problem.kind
    bddl = f"bddl_files/{suite_folder(task.suite)}/{task.name}.bddl"
    env_name = "_".join(word.capitalize() for word in problem.split("_"))
    env_kwargs = {
        "bddl_file_name": bddl,
        "robots": ["Panda"],
        "control_freq": 20,
        "camera_names": ["robot0_eye_in_hand", "agentview"],
        "camera_heights": image_size,
        "camera_widths": image_size,
    }
    env_args = {
        "type": _ROBOSUITE_TYPE,
        "env_name": env_name,
        "problem_name": problem,
        "bddl_file": bddl,
        "env_kwargs": env_kwargs,
    }
    problem_info = {
        "problem_name": problem,
        "domain_name": "robosuite",
        "language_instruction": task.instruction,
    }
    return {
        "env_name": env_name,
        "env_args": json.dumps(env_args),
        "problem_info": json.dumps(problem_info),
        "bddl_file_name": bddl,
        "bddl_file_content": task.bddl,
        "macros_image_convention": _IMAGE_CONVENTION,
    }


def read_meta(path: Path) -> dict[str, Any]:
    """Return how a file's demonstrations were made.

    Raises:
        ConfigError: If the file is damaged or not written by ``vla-gym demos``.
    """
    with _reading(path) as file:
        return parse_json(file["data"].attrs["vla_gym"], Object, f"{path}: vla_gym")


class _Problem(Struct):
    language_instruction: str


def read_instruction(path: Path) -> str:
    """Return the instruction of a file in LIBERO's layout.

    Raises:
        ConfigError: If it is damaged or none.
    """
    with _reading(path) as file:
        info = parse_json(file["data"].attrs["problem_info"], _Problem, f"{path}: problem_info")
        return info.language_instruction


def read_success_steps(path: Path) -> list[int]:
    """Return of each episode the frame after whose action the goal first holds; else its last.

    Raises:
        ConfigError: If the file is damaged or has another layout.
    """
    with _reading(path) as file:
        demos = [file["data"][name] for name in _episode_names(file["data"])]
        return [int(d.attrs.get("success_step", len(d["actions"]) - 1)) for d in demos]


def read_episodes(
    path: Path, limit: int | None = None, executed: bool = False
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield the episodes of a file in LIBERO's layout, ``demo_0`` first.

    Args:
        path: The file.
        limit: Only the first so many; None for all.
        executed: The actions as they were executed, with noise, in place of the undisturbed ones,
            of files that hold both.

    Yields:
        images (T, 2, S, S, 3) uint8, agentview then wrist, upright; proprio (T, 8) float32;
        actions (T, 7) float32.

    Raises:
        ConfigError: If the file is damaged or has another layout.
    """
    with _reading(path) as file:
        data = file["data"]
        flip = data.attrs.get("macros_image_convention", _IMAGE_CONVENTION) == _IMAGE_CONVENTION
        for name in _episode_names(data)[:limit]:
            obs = data[name]["obs"]
            images = np.stack([obs[key][()] for key in IMAGE_KEYS], axis=1)
            proprio = np.concatenate([obs["ee_states"][()], obs["gripper_states"][()]], axis=1)
            key = "executed_actions" if executed and "executed_actions" in data[name] else "actions"
            actions = data[name][key][()].astype(np.float32)
            found = images.shape[:2], proprio.shape, actions.shape
            steps = len(images)
            if not steps:
                raise ValueError(f"{name}: no frames")
            if images.ndim != 5 or found != ((steps, 2), (steps, 8), (steps, 7)):
                raise ValueError(f"{name}: images, states and actions of shapes {found}")
            if not (np.isfinite(proprio).all() and np.isfinite(actions).all()):
                raise ValueError(f"{name}: states or actions that are not finite")
            yield images[:, :, ::-1] if flip else images, proprio.astype(np.float32), actions


class DemoPath(NamedTuple):
    """A demonstration as it can be played again.

    Attributes:
        state: (1 + nq + nv,) time, qpos and qvel before the first action.
        fixture_pos, fixture_quat: (F, 3), (F, 4), see ``Layout``.
        actions: (T, 7) float32, as executed, up to the one that reached the goal.
    """

    state: np.ndarray
    fixture_pos: np.ndarray
    fixture_quat: np.ndarray
    actions: np.ndarray


def read_paths(file_path: Path) -> list[DemoPath]:
    """Return what it takes to play each episode of a file of ``vla-gym demos`` again.

    Raises:
        ConfigError: If the file is damaged or not written by ``vla-gym demos``.
    """
    ends = read_success_steps(file_path)
    with _reading(file_path) as file:
        paths = []
        for name, last in zip(_episode_names(file["data"]), ends, strict=True):
            demo = file["data"][name]
            first = ("init_state", "fixture_pos", "fixture_quat")
            state, pos, quat = (np.array(demo.attrs[key]) for key in first)
            path = DemoPath(state, pos, quat, demo["executed_actions"][: last + 1])
            if not all(np.isfinite(part).all() for part in path) or not len(path.actions):
                raise ValueError(f"{name}: no actions, or states or actions that are not finite")
            paths.append(path)
        return paths


def _episode_names(data: h5py.Group) -> list[str]:
    return sorted(data, key=lambda name: int(name.removeprefix("demo_")))


@contextmanager
def _reading(path: Path) -> Iterator[h5py.File]:
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, KeyError, ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"{path} cannot be read as demonstrations in LIBERO's layout ({error}): delete it or "
            "record it again with 'vla-gym demos --overwrite'."
        ) from error
