"""The tiny checkpoint of every backend, and observations for them."""

import shutil
from pathlib import Path

import numpy as np
from openvla_checkpoints import CHECKPOINT

from vla_gym.vla.files import WEIGHTS_ROOT

GOLDEN = Path(__file__).parents[1] / "golden"
#: Name -> backend and folder; OpenVLA's are made by the fixture ``checkpoints``.
FOLDERS = {
    "mini": ("mini", WEIGHTS_ROOT / "mini"),
    "smolvla": ("smolvla", GOLDEN / "smolvla"),
    "pi0": ("pi0", GOLDEN / "pi0"),
    "pi05": ("pi05", GOLDEN / "pi05"),
    "qwen25": ("qwen-oft", GOLDEN / "qwenoft" / "qwen25"),
    "qwen3": ("qwen-oft", GOLDEN / "qwenoft" / "qwen3"),
}
CASES = {"openvla-oft": "l1_2img_proprio", "openvla": "tokens_1img"}
#: A backend's name -> its smallest folder.
CHECKPOINTS = {
    "mini": WEIGHTS_ROOT / "mini",
    "openvla-oft": CHECKPOINT,
    **{name: GOLDEN / name for name in ("pi0", "pi05", "smolvla")},
    "qwen-oft": GOLDEN / "qwenoft" / "qwen3",
}
NAMES = (*FOLDERS, *CASES)
PROMPTS = ["put the bowl on the plate", "turn on the stove", "open the middle drawer"]


def backend_and_folder(name, checkpoints):
    """Return a name's backend and folder."""
    return FOLDERS[name] if name in FOLDERS else (name, checkpoints[CASES[name]])


def copied(folder: Path, to: Path) -> Path:
    """Copy a folder without the checksums of its weights, so that they may be others."""
    shutil.copytree(folder, to)
    (to / "SHA256SUMS").unlink(missing_ok=True)
    return to


def observe(vla, batch=3, seed=0):
    """Return images, instructions and proprioception."""
    rng = np.random.default_rng(seed)
    shape = (batch, vla.image_size, vla.image_size, 3)
    images = {view: rng.integers(0, 256, shape, np.uint8) for view in ("agentview", "wrist")}
    return images, PROMPTS[:batch], rng.normal(size=(batch, 8)).astype(np.float32)
