"""What runs leave behind, to be compared without what differs from run to run; a cut-off run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from vla_gym_trainers.report.data import read_rows

#: Keys that say how long something took; everything else repeats bit for bit after resuming.
TIMES = {"wall_s"} | {
    f"time/{name}"
    for name in ("fps", "time_elapsed", "seconds", "rollout", "forward", "learn", "wait")
}


def rows_without_times(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.jsonl``."""
    return [{k: v for k, v in row.items() if k not in TIMES} for row in read_rows(path)]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's log."""
    return rows_without_times(folder / "metrics.jsonl")


def assert_same_weights(first: Path, second: Path) -> None:
    """Compare what two runs have learnt, bit for bit."""
    one, other = (load_file(folder / "last.safetensors") for folder in (first, second))
    assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def cut_off(run: Path, to: Path) -> list[Path]:
    """Copy a run as it was after its first checkpoint; return where all of them were."""
    shutil.copytree(run, to)
    checkpoints = sorted((to / "checkpoints").glob("[0-9]*"))
    assert len(checkpoints) >= 3
    for later in checkpoints[1:]:
        shutil.rmtree(later)
    (to / "last.safetensors").unlink()
    return checkpoints


def change_state(checkpoint: Path, **changes: Any) -> None:
    """Change what a checkpoint says of its trainer; it stays a whole one."""
    state = json.loads((checkpoint / "state.json").read_text())
    text = json.dumps({**state, "trainer": {**state["trainer"], **changes}})
    (checkpoint / "state.json").write_text(text)
    sizes = json.loads((checkpoint / "files.json").read_text())
    (checkpoint / "files.json").write_text(json.dumps({**sizes, "state.json": len(text)}))


def assert_goes_on(run: Callable[..., Any], folder: Path, **changes: Any) -> Path:
    """Compare a run with one that was cut off after its first checkpoint, log and weights.

    Returns:
        The folder of the whole run.
    """
    whole, cut = folder / "whole", folder / "cut"
    changes["keep_checkpoints"] = 9
    run(whole, **changes)
    cut_off(whole, cut)
    run(cut, auto_resume=True, **changes)
    assert_same_weights(cut, whole)
    assert rows_of(cut) == rows_of(whole)
    # Not begun anew: what was logged before the checkpoint is still there.
    first, same = (read_rows(folder / "metrics.jsonl")[0]["wall_s"] for folder in (whole, cut))
    assert first == same
    return whole
