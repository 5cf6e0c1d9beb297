"""Pictures of what a world model predicts: agentview, true wrist frame, predicted wrist frame."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vla_gym.files import replacing
from vla_gym.rollout import video
from vla_gym_trainers.world_model.data import BEHAVIOURS, Sequences, named_task
from vla_gym_trainers.world_model.evaluate import memory_states, predict
from vla_gym_trainers.world_model.protocol import WorldModel

#: Pixels of a picture for one of a frame.
ZOOM = 3
#: Steps in a strip.
STRIP_STEPS = 12


def write_pictures(path: Path, model: WorldModel, data: Sequences) -> None:
    """Write a film, and a strip of some of its steps beside it as .png.

    Both show the first episode of each behaviour. At step t that is the main camera's frame, the
    wrist camera's, and what the model expected the wrist camera to show when it knew the steps
    before t and the chunk that led to it. The data has tokens and the main camera's frames.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    states = memory_states(model, data)
    tiles, strips = [], []
    for behaviour in np.unique(data.behaviour):
        episode = data.episode[np.flatnonzero(data.behaviour == behaviour)[0]]
        rows = np.flatnonzero(data.episode == episode)
        rows = rows[data.executed[rows] > 0]
        if not len(rows):
            continue
        expected = predict(model, data, states, rows).frames
        shown = np.stack([data.agentview[rows + 1], data.frames[rows + 1], expected], axis=1)
        tiles.append(_film(shown, data, rows))
        chosen = np.linspace(0, len(shown) - 1, STRIP_STEPS).round().astype(int)
        strips += [np.concatenate(list(shown[chosen, kind]), axis=1) for kind in range(3)]
    if tiles:
        video.write_video(path, video.tiled_frames(tiles))
        _write_png(path.with_suffix(".png"), np.concatenate(strips))


def _film(shown: np.ndarray, data: Sequences, rows: np.ndarray) -> video.TileFrames:
    """Return an episode's tile; each step stays as long as its chunk took."""
    task = named_task(data.tasks[data.task[rows[0]]])
    label = f"{BEHAVIOURS[data.behaviour[rows[0]]]}: scene, wrist, predicted wrist"
    width = shown.shape[1] * shown.shape[2] * ZOOM
    lines = video.text_rows([named_task(key).instruction for key in data.tasks], width)
    steps, frames = np.cumsum(data.executed[rows]), video.TileFrames()
    for views, step, executed in zip(shown, steps, data.executed[rows], strict=True):
        images = [view.repeat(ZOOM, axis=0).repeat(ZOOM, axis=1) for view in views]
        status = video.Status(label, int(step), task.max_control_steps)
        tile = video.draw_tile(images, task.instruction, status, lines)
        for _ in range(int(executed)):
            frames.append(tile)
    return frames


def _write_png(path: Path, picture: np.ndarray) -> None:
    from PIL import Image

    with replacing(path) as draft:
        Image.fromarray(picture.repeat(2, axis=0).repeat(2, axis=1)).save(draft, "PNG")
