"""Checkpoints of VLAs: configurations, processors, statistics, shards, adapters, weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cases_files import damaged, spoilt_json, spoilt_tensors
from engine import Case, Nonsense
from hostile_data import LONG
from openvla_checkpoints import write_tokenizer
from vla_checkpoints import CHECKPOINTS

from vla_gym.vla import load
from vla_gym.vla.base import PROPRIO_SIZE
from vla_gym.vla.lora import LoraAdapters, LoraSettings


def acts(vla: Any) -> None:
    """Let a VLA look at a black picture; its chunk must be one."""
    side = vla.image_size
    images = {name: np.zeros((1, side, side, 3), np.uint8) for name in vla.cameras}
    out = vla.infer(images, ["open the drawer"], np.zeros((1, PROPRIO_SIZE), np.float32))
    actions = np.asarray(out.actions)
    if actions.shape != (1, vla.horizon, vla.action_size) or not np.isfinite(actions).all():
        raise Nonsense(f"actions {actions.shape}, finite: {np.isfinite(actions).all()}")


def loads(bad: Path, name: str) -> None:
    """Load a checkpoint, and let it act."""
    if name == "openvla-oft":
        write_tokenizer(bad)
    acts(load(f"{name}:{bad}"))


def _adapted(bad: Path) -> None:
    acts(load(f"mini:{CHECKPOINTS['mini']}?adapters={bad}"))


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield the cases of VLAs, about ``count``."""
    group = "checkpoints of VLAs"
    for name, folder in CHECKPOINTS.items():
        read = partial(loads, name=name)
        files = [path for path in sorted(folder.rglob("*.json")) if "golden" not in path.name]
        names = [str(path.relative_to(folder)) for path in files if path.stat().st_size < 200_000]
        each = max(1, count // (len(CHECKPOINTS) * len(names)))
        for number, file in enumerate(names):
            yield from spoilt_json(group, folder, file, each, seed + number, read)
        weights = sorted(folder.glob("*.safetensors"))[0]
        good = weights.read_bytes()
        yield from damaged(group, folder, weights.name, [good], read, "accepted")
        tensors = spoilt_tensors(good, max(1, count // 60), seed)
        yield from damaged(group, folder, weights.name, tensors, read)
    scratch = Path(tempfile.mkdtemp(prefix="hostile-good-"))
    try:
        vla: Any = load(f"mini:{CHECKPOINTS['mini']}")
        LoraAdapters.add(vla, LoraSettings(r=2)).save(scratch)
        config, weights = scratch / "adapter_config.json", scratch / "adapter_model.safetensors"
        whole = [config.read_text()]
        yield from damaged("adapters", scratch, config.name, whole, _adapted, "accepted")
        yield from spoilt_json("adapters", scratch, config.name, count // 6, seed, _adapted)
        tensors = spoilt_tensors(weights.read_bytes(), count // 20, seed)
        yield from damaged("adapters", scratch, weights.name, tensors, _adapted)
        specs = "mini?nonsense=1", "mini?seed=x", "class:", "pi0:\0", "?", ":", "mini:?"
        for spec in (LONG, *specs):
            yield Case(group, spec[:40], lambda _, s=spec: acts(load(s)))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
