"""A small MiniVLA configuration, inputs for it and demonstrations to clone."""

import json

import h5py
import numpy as np

from vla_gym.vla.mini.model import MiniVLAConfig
from vla_gym.vla.tokens import build_vocabulary

INSTRUCTIONS = ["put the bowl on the stove", "open the middle drawer of the cabinet"]


def small_config(**kwargs):
    vocabulary = build_vocabulary(INSTRUCTIONS)
    return MiniVLAConfig(vocabulary=vocabulary, hidden_size=32, num_layers=2, **kwargs)


def random_inputs(batch, size=128, seed=0):
    rng = np.random.default_rng(seed)
    images = {
        key: rng.integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
        for key in ("agentview", "wrist")
    }
    texts = [INSTRUCTIONS[i % 2] for i in range(batch)]
    return images, texts, rng.normal(size=(batch, 8)).astype(np.float32)


def write_demos(folder, episodes=5, length=12, seed=0):
    """Two tasks whose action is a plain function of task, image brightness and position."""
    rng = np.random.default_rng(seed)
    for task, instruction in enumerate(INSTRUCTIONS):
        count = episodes * length
        level = rng.uniform(0, 255, count)
        images = np.broadcast_to(level[:, None, None, None, None], (count, 2, 128, 128, 3))
        proprio = rng.normal(size=(count, 8)).astype(np.float32)
        actions = np.zeros((count, 7), np.float32)
        actions[:, 0] = 0.8 if task else -0.8
        actions[:, 6] = np.sign(0.5 - task)
        with h5py.File(folder / f"task_{task}_demo.hdf5", "w") as file:
            data = file.create_group("data")
            data.attrs["problem_info"] = json.dumps({"language_instruction": instruction})
            for episode, rows in enumerate(np.split(np.arange(count), episodes)):
                obs = data.create_group(f"demo_{episode}/obs")
                for camera, key in enumerate(("agentview_rgb", "eye_in_hand_rgb")):
                    obs[key] = images[rows, camera].astype(np.uint8)
                obs["ee_states"], obs["gripper_states"] = proprio[rows, :6], proprio[rows, 6:]
                data[f"demo_{episode}/actions"] = actions[rows]
