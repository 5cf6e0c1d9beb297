"""Checkpoints of VLAs: configurations, processors, statistics, shards, adapters, weights."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cases_files import copy, spoilt_tensors, texts
from engine import Case, Nonsense
from hostile_data import LONG
from openvla_checkpoints import CHECKPOINT, write_tokenizer

from vla_gym.vla import load
from vla_gym.vla.base import PROPRIO_SIZE
from vla_gym.vla.files import WEIGHTS_ROOT
from vla_gym.vla.lora import LoraAdapters, LoraSettings

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = {
    "mini": WEIGHTS_ROOT / "mini",
    "openvla-oft": CHECKPOINT,
    **{name: GOLDEN / name for name in ("pi0", "pi05", "smolvla")},
    "qwen-oft": GOLDEN / "qwenoft" / "qwen3",
}


def acts(vla: Any) -> None:
    """Let a VLA look at a black picture; its chunk must be one."""
    side = vla.image_size
    images = {name: np.zeros((1, side, side, 3), np.uint8) for name in vla.cameras}
    out = vla.infer(images, ["open the drawer"], np.zeros((1, PROPRIO_SIZE), np.float32))
    actions = np.asarray(out.actions)
    if actions.shape != (1, vla.horizon, vla.action_size) or not np.isfinite(actions).all():
        raise Nonsense(f"actions {actions.shape}, finite: {np.isfinite(actions).all()}")


def _loads(at: Path, name: str, file: str, content: bytes) -> None:
    bad = copy(FOLDERS[name], at / "bad")
    if name == "openvla-oft":
        write_tokenizer(bad)
    (bad / file).write_bytes(content)
    acts(load(f"{name}:{bad}"))


def _adapted(at: Path, source: Path, file: str, content: bytes) -> None:
    bad = copy(source, at / "adapters")
    (bad / file).write_bytes(content)
    acts(load(f"mini:{FOLDERS['mini']}?adapters={bad}"))


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield the cases of VLAs, about ``count``."""
    for name, folder in FOLDERS.items():
        files = [path for path in sorted(folder.rglob("*.json")) if "golden" not in path.name]
        names = [str(path.relative_to(folder)) for path in files if path.stat().st_size < 200_000]
        each = max(1, count // (len(FOLDERS) * len(names)))
        for number, file in enumerate(names):
            for text in texts((folder / file).read_text(), each, seed + number):
                run = partial(
                    _loads, name=name, file=file, content=text.encode("utf-8", "surrogatepass")
                )
                yield Case("checkpoints of VLAs", f"{name} {file} {text}"[:120], run)
        weights = sorted(folder.glob("*.safetensors"))[0]
        run = partial(_loads, name=name, file=weights.name, content=weights.read_bytes())
        yield Case("checkpoints of VLAs", f"{name} as it is", run, wanted="accepted")
        for content in spoilt_tensors(weights.read_bytes(), max(1, count // 60), seed):
            run = partial(_loads, name=name, file=weights.name, content=content)
            yield Case("checkpoints of VLAs", f"{name} {weights.name} {content[:60]!r}", run)
    scratch = Path(tempfile.mkdtemp(prefix="hostile-good-"))
    try:
        vla: Any = load(f"mini:{FOLDERS['mini']}")
        LoraAdapters.add(vla, LoraSettings(r=2)).save(scratch)
        config, weights = scratch / "adapter_config.json", scratch / "adapter_model.safetensors"
        run = partial(_adapted, source=scratch, file=config.name, content=config.read_bytes())
        yield Case("adapters", "as they are", run, wanted="accepted")
        bad = [
            t.encode("utf-8", "surrogatepass") for t in texts(config.read_text(), count // 6, seed)
        ]
        for content in bad:
            run = partial(_adapted, source=scratch, file=config.name, content=content)
            yield Case("adapters", f"{content[:110]!r}", run)
        for content in spoilt_tensors(weights.read_bytes(), count // 20, seed):
            run = partial(_adapted, source=scratch, file=weights.name, content=content)
            yield Case("adapters", f"weights {content[:90]!r}", run)
        for spec in (
            LONG,
            "mini?nonsense=1",
            "mini?seed=x",
            "class:",
            "pi0:\0",
            "?",
            ":",
            "mini:?",
        ):
            yield Case("checkpoints of VLAs", spec[:40], lambda _, s=spec: acts(load(s)))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
