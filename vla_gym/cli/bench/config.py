"""Options of ``vla-gym bench`` and the systems that they stand for."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from vla_gym.assets import resolve_asset_pack
from vla_gym.assets.pack import default_assets
from vla_gym.cli.bench.peer_venvs import PEERS, peer_python
from vla_gym.cli.options import check_report
from vla_gym.envs.scene_cache import VisualProfile
from vla_gym.errors import ConfigError
from vla_gym.outside import Count, PositiveInt, check_fields
from vla_gym.suites import get_suite, get_task
from vla_gym.suites.registry import SUITES

PeerName = Literal["rlinf", "torchrl", "lerobot", "libero2gym"]
#: What tables call the systems.
NAMES = {"ours": "ours", "libero": "LIBERO's", "async": "Gymnasium's"}


@dataclass(frozen=True)
class BenchConfig:
    """Measure LiberoVectorEnv beside LIBERO's SubprocVectorEnv and Gymnasium's AsyncVectorEnv.

    All play the same actions on the same tasks in turns within one run, each in a process of its
    own, with the same number of worker processes. Trust the ratios: other work on the machine
    hits all systems alike. Without options this takes about three minutes on two cores.
    """

    systems: tuple[Literal["ours", "libero", "async"], ...] = ("ours", "libero", "async")
    """Which systems run; ratios are to LIBERO's, or else to the last one."""
    peers: tuple[PeerName, ...] | None = None
    """Other packages' environments of LIBERO beside them, each in a virtual environment of its own
    that is made in the cache folder (about 2 GB each); without names, all four."""
    suite: str = "goal"
    """Suite name."""
    task_ids: tuple[int, ...] = (8,)
    """Environment i plays task i modulo their number; see vla-gym tasks."""
    assets: str = field(default_factory=default_assets)
    """Asset pack: lite, libero or a path."""
    workers: PositiveInt | None = None
    """Worker processes of every system; default: one a core. The others have one env a worker."""
    num_envs: PositiveInt | None = None
    """Environments of ours with several a worker, measured too; default: 4 a worker."""
    chunk_len: PositiveInt = 8
    """Control steps an action, 1 or more; LIBERO's has no chunks and gets them one by one."""
    image_size: Count = 256
    """Height and width of both cameras' images; 0: state only."""
    visual_profile: VisualProfile | None = None
    """Ours: libero (upstream's pixels), fast or coarse; default: libero on the real pack, else
    fast."""
    rounds: PositiveInt = 5
    """Measured rounds; in each, every system resets and plays for a second."""
    starts: Count = 2
    """How often each system is started by itself, for its start-up time and memory; 0: never."""
    chunks: PositiveInt = 2
    """Chunks between two resets."""
    seed: Count = 0
    """Seed of the actions and of the first reset."""
    json: Path | None = None
    """Write the full report here."""

    def __post_init__(self) -> None:
        """Check the values."""
        check_fields(self)
        if not self.systems or not self.task_ids:
            raise ConfigError("systems and task_ids must name at least one thing.")
        for task_id in self.task_ids:
            get_task(self.suite, task_id)
        if not get_suite(self.suite).num_init_states:
            raise ConfigError(
                f"The suite {self.suite!r} has no official states, where rounds begin: choose one "
                f"of {', '.join(SUITES)}."
            )
        if self.peers is not None and self.image_size == 0:
            raise ConfigError("Peers always observe images: image_size must be at least 1, got 0.")
        if self.peers is not None and self.suite not in SUITES:
            raise ConfigError(
                f"Peers play LIBERO's suites {', '.join(SUITES)}, got {self.suite!r:.80}."
            )
        if self.num_envs is not None and self.num_envs < self.num_workers:
            raise ConfigError(
                f"num_envs must be at least the number of workers, {self.num_workers}, "
                f"got {self.num_envs}."
            )
        check_report(self.json)

    @property
    def num_workers(self) -> int:
        """Worker processes of every system."""
        return self.workers or len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class SystemSpec:
    """One system and the environments that it runs.

    Attributes:
        name: Unique in a report, and what tables call it.
        system: ``"ours"``: LiberoVectorEnv. ``"async"``: Gymnasium's AsyncVectorEnv over our
            single environment. ``"libero"``: LIBERO's SubprocVectorEnv over its own environments.
            Else a peer.
        num_envs: Environments in all; the other systems have one a worker.
        config: What they play.
    """

    name: str
    system: Literal["ours", "async", "libero"] | PeerName
    num_envs: int
    config: BenchConfig

    def task_of(self, index: int) -> int:
        """Return the task of an environment."""
        return self.config.task_ids[index % len(self.config.task_ids)]

    @property
    def is_peer(self) -> bool:
        """Whether it is another package's."""
        return self.system not in NAMES

    def peer_command(self) -> tuple[str, tuple[str, dict[str, Any]]]:
        """Return a peer's interpreter, and the arguments that its environments are made from.

        Raises:
            BenchError: If its virtual environment cannot be made.
        """
        config = self.config
        options = {
            "suite": f"libero_{config.suite}",
            "tasks": [self.task_of(i) for i in range(self.num_envs)],
            "image_size": config.image_size,
            "chunk_len": config.chunk_len,
            "seed": config.seed,
        }
        python = peer_python(self.system, resolve_asset_pack(config.assets).root)
        return str(python), (self.system, options)


def system_specs(config: BenchConfig) -> list[SystemSpec]:
    """Return what is compared: ours with one and with several environments a worker, the others."""
    specs = []
    workers, many = config.num_workers, config.num_envs or 4 * config.num_workers
    for system in config.systems:
        specs.append(SystemSpec(NAMES[system], system, workers, config))
        if system == "ours" and many > workers:
            specs.append(SystemSpec(f"{NAMES[system]}, {many} envs", system, many, config))
    if config.peers is not None:
        for peer in config.peers or get_args(PeerName):
            specs.append(SystemSpec(PEERS[peer].title, peer, workers, config))
    return specs
