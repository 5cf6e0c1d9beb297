"""The tiny checkpoint of every backend, and observations for them."""

from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden"
#: Name -> backend and folder; OpenVLA's are made by the fixture ``checkpoints``.
FOLDERS = {
    "smolvla": ("smolvla", GOLDEN / "smolvla"),
    "pi0": ("pi0", GOLDEN / "pi0"),
    "pi05": ("pi05", GOLDEN / "pi05"),
    "qwen25": ("qwen-oft", GOLDEN / "qwenoft" / "qwen25"),
    "qwen3": ("qwen-oft", GOLDEN / "qwenoft" / "qwen3"),
}
CASES = {"openvla-oft": "l1_2img_proprio", "openvla": "tokens_1img"}
NAMES = (*FOLDERS, *CASES)
PROMPTS = ["put the bowl on the plate", "turn on the stove", "open the middle drawer"]


def backend_and_folder(name, checkpoints):
    """Return a name's backend and folder."""
    return FOLDERS[name] if name in FOLDERS else (name, checkpoints[CASES[name]])


def observe(vla, batch=3, seed=0):
    """Return images, instructions and proprioception."""
    rng = np.random.default_rng(seed)
    shape = (batch, vla.image_size, vla.image_size, 3)
    images = {view: rng.integers(0, 256, shape, np.uint8) for view in ("agentview", "wrist")}
    return images, PROMPTS[:batch], rng.normal(size=(batch, 8)).astype(np.float32)
