"""Demonstrations as a LeRobotDataset, written through LeRobot's own API."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lerobot.datasets.lerobot_dataset import LeRobotDataset

from vla_gym.demos.files import read_episodes, read_instruction, read_success_steps
from vla_gym.suites.libero.spec import ACTION, CONTROL_HZ, PROPRIO

#: LeRobot's names of the two cameras, in the order of ``read_episodes``.
_IMAGES = ("observation.images.image", "observation.images.image2")


def write_dataset(paths: Sequence[Path], output: Path, *, videos: bool = False) -> Path:
    """Write demonstrations in LIBERO's HDF5 layout as one LeRobotDataset.

    A frame holds what ``LiberoProcessorStep`` makes of LeRobot's LIBERO environment:
    ``observation.images.image`` (agentview) and ``image2`` (wrist), turned by 180 degrees from
    OpenGL's order; ``observation.state`` (8,) and ``action`` (7,) float32; ``next.success``,
    whether the goal holds after the action, and ``next.done`` at the last frame; the task's words.

    Args:
        paths: The files, see ``vla_gym.demos``.
        output: Folder of the dataset; it appears when it is whole.
        videos: Whether to encode images as videos, with loss, in place of PNG.

    Returns:
        ``output``.

    Raises:
        ConfigError: A file is damaged.
        FileExistsError: The folder exists.
    """
    if output.exists():
        raise FileExistsError(f"{output} exists.")
    scratch = output.with_name(f".{output.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was stopped
    dataset: Any = None
    for path in paths:
        task, steps = read_instruction(path), read_success_steps(path)
        for (images, proprio, actions), success in zip(read_episodes(path), steps, strict=True):
            if dataset is None:
                dataset = _create(scratch, images.shape[2:], videos)
            last = len(actions) - 1
            for t, (views, state, action) in enumerate(zip(images, proprio, actions, strict=True)):
                dataset.add_frame(
                    {
                        **{k: view[:, ::-1] for k, view in zip(_IMAGES, views, strict=True)},
                        "observation.state": state,
                        "action": action,
                        "next.success": np.array([t >= success]),
                        "next.done": np.array([t == last]),
                        "task": task,
                    }
                )
            dataset.save_episode()
    dataset.finalize()
    return scratch.rename(output)


def _create(folder: Path, shape: tuple[int, ...], videos: bool) -> Any:
    state = [f"{name}_{i}" for name, size in PROPRIO.parts for i in range(size)]
    image = {
        "dtype": "video" if videos else "image",
        "shape": shape,
        "names": ["height", "width", "channel"],
    }
    features: dict[str, dict[str, Any]] = {
        **{name: dict(image) for name in _IMAGES},
        "observation.state": {"dtype": "float32", "shape": (len(state),), "names": state},
        "action": {"dtype": "float32", "shape": (ACTION.size,), "names": list(ACTION.names)},
        **{
            n: {"dtype": "bool", "shape": (1,), "names": None}
            for n in ("next.success", "next.done")
        },
    }
    return LeRobotDataset.create(
        "vla_gym/libero",
        fps=int(CONTROL_HZ),
        features=features,
        root=folder,
        robot_type="panda",
        use_videos=videos,
    )
