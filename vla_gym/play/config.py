"""Options of ``vla-gym play``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

Who = Literal["expert", "vla", "random", "policy"]
LABELS: dict[Who, str] = {
    "expert": "scripted expert",
    "vla": "VLA",
    "random": "random actions",
    "policy": "trained policy",
}


@dataclass(frozen=True)
class PlayConfig:
    """Play episodes and write one video: cameras, instruction, step, outcome.

    Every task is played from every state (or seed); more than one episode are tiled.
    """

    suite: str = "goal"
    """Suite name."""
    task_ids: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--task-id"])] = (8,)
    """Tasks in the suite; see vla-gym tasks."""
    who: Who = "expert"
    """Who acts."""
    policy: Path | None = None
    """A run directory of vla-gym-train, or a .zip of its td3; needed for --who policy."""
    vla: str | None = None
    """The frozen VLA: mini, mini-few, <backend>:/path?option=value, or a folder; default: mini, or
    the one of the policy's run."""
    rl_token: str | None = None
    """Of a policy: folder of its RL token's encoder, auto or mean; default: the run's."""
    device: str = "cpu"
    """Torch device of the VLA, e.g. cuda."""
    chunk_len: int | None = None
    """Control steps the VLA executes per decision; default: its horizon. A policy has its own."""
    init_state_ids: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--init-state-id"])] = (0,)
    """Official initial states, 0..49."""
    seeds: tuple[int, ...] = ()
    """Play layouts sampled with these seeds instead of official states."""
    cameras: Literal["both", "agentview", "wrist"] = "both"
    """What the video shows."""
    size: int | None = None
    """Pixels of a camera's side; default: 256 for up to four tiles, less for more."""
    max_steps: int | None = None
    """End an episode after so many control steps; default: the suite's limit."""
    assets: str = "lite"
    """Asset pack: lite, libero, auto (libero if it is there), or a path."""
    physics: Literal["fast", "exact"] = "fast"
    """Physics mode."""
    variation: str | None = None
    """How light, cameras, colours and clutter vary from tile to tile: mild or strong."""
    out: Path = Path("episode.mp4")
    """The video; .mp4 or .gif."""
