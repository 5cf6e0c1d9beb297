"""Options of ``vla-gym bench``."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vla_gym.errors import ConfigError
from vla_gym.suites import get_task

Part = Literal["speed", "startup", "overhead", "scaling"]
_PRESET_FIELDS = ("measure", "assets", "image_size", "visual_profile", "chunk_len", "num_envs")


@dataclass(frozen=True)
class BenchConfig:
    """Measure LiberoVectorEnv beside LIBERO's SubprocVectorEnv and Gymnasium's AsyncVectorEnv.

    All play the same actions on the same tasks in turns within one run, each in a process of its
    own, with the same number of worker processes. Trust the ratios: other work on the machine
    hits all systems alike. Without options this takes about three minutes on two cores.
    """

    preset: Literal["quick", "full"] | None = None
    """quick: the lite pack at 64x64, under a minute. full: every scenario and target of
    docs/performance.md, about 15 minutes; it fixes what is measured, on which pack and how."""
    systems: tuple[Literal["ours", "libero", "async"], ...] = ("ours", "libero", "async")
    """Which systems run; ratios are of ours to the others."""
    measure: tuple[Part, ...] = ("speed", "startup")
    """speed: control steps/s and reset latency. startup: process start to the first observation,
    and memory. overhead: the vector env's own cost, without simulation. scaling: workers against
    as many independent processes."""
    suite: str = "goal"
    """Suite name."""
    task_ids: tuple[int, ...] = (8,)
    """Environment i plays task i modulo their number; see vla-gym tasks."""
    assets: str | None = None
    """Asset pack: lite, libero or a path; default: libero if this machine has it, else lite."""
    workers: int | None = None
    """Worker processes of every system; default: one a core. The others have one env a worker."""
    num_envs: int | None = None
    """Environments of ours with several a worker, measured too; default: 4 a worker."""
    chunk_len: int = 8
    """Control steps an action, 1 or more; upstream has no chunks and gets them one by one."""
    image_size: int = 256
    """Height and width of both cameras' images; 0: state only."""
    visual_profile: Literal["libero", "fast"] | None = None
    """Ours: libero (upstream's pixels) or fast; default: libero on the real pack, else fast."""
    rounds: int = 5
    """Measured rounds; in each, every system resets and plays once, or more if it is fast."""
    chunks: int = 2
    """Chunks between two resets."""
    seed: int = 0
    """Seed of the actions and of the first reset."""
    actions: Path | None = None
    """An .npz with actions (N, T, 7) to play instead of random ones."""
    profile: bool = False
    """Also split the time of ours: physics, rendering, Python, between processes."""
    json: Path | None = None
    """Write the full report here."""
    show: Path | None = None
    """Measure nothing; print the tables of such a report."""
    page: Path | None = None
    """Also write the tables into this Markdown page, between its bench markers."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is out of range or contradicts the preset.
            UnknownTaskError: A task does not exist.
        """
        for name in ("rounds", "chunks", "chunk_len", "workers", "num_envs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}.")
        if self.image_size < 0 or self.seed < 0:
            raise ConfigError("image_size and seed must not be negative.")
        if not self.systems or not self.task_ids or not (self.measure or self.profile):
            raise ConfigError("systems, task_ids and measure must name at least one thing.")
        for task_id in self.task_ids:
            get_task(self.suite, task_id)
        if self.num_envs is not None and self.num_envs < self.num_workers:
            raise ConfigError(
                f"num_envs must be at least the number of workers, {self.num_workers}, "
                f"got {self.num_envs}."
            )
        if self.preset is not None:
            defaults = {field.name: field.default for field in dataclasses.fields(self)}
            changed = [n for n in _PRESET_FIELDS if getattr(self, n) != defaults[n]]
            if changed:
                raise ConfigError(
                    f"preset {self.preset!r} fixes {', '.join(changed)}: leave out the preset or "
                    "these options."
                )

    @property
    def num_workers(self) -> int:
        """Worker processes of every system."""
        return self.workers or len(os.sched_getaffinity(0))

    def thread_environment(self) -> dict[str, str]:
        """Return thread counts, equal for all systems: one a worker, which also draws."""
        single = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
        return {"LP_NUM_THREADS": "0", **dict.fromkeys(single, "1")}
