"""What is compared with what: plain data that travels to the processes under measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: What a process under measurement can run, see ``drivers``.
System = Literal[
    "ours", "ours-send", "libero", "async", "single", "profiled", "stub-ours", "stub-async"
]

#: Seconds that a call of a system under measurement may take.
CALL_DEADLINE_S = 300.0
#: Asset pack of environments without a simulation.
NO_ASSETS = "none"
#: What tables call the systems.
SYSTEM_NAMES: dict[str, str] = {
    "ours": "ours",
    "libero": "LIBERO's",
    "async": "Gymnasium's",
}
LEGEND = (
    "Ours: vla_gym.vector.LiberoVectorEnv. LIBERO's: SubprocVectorEnv over its OffScreenRenderEnv "
    "(ControlEnv without cameras). Gymnasium's: AsyncVectorEnv over our single environment."
)


@dataclass(frozen=True)
class EnvSpec:
    """Which environments are run.

    Attributes:
        suite: Suite name.
        task_ids: Environment i plays task_ids[i % len(task_ids)].
        assets: Asset pack.
        image_size: Height and width of both cameras' images; 0: no cameras.
        visual_profile: ``libero`` or ``fast``; None: as the pack has it. Upstream has only its own.
        chunk_len: Control steps a call, for systems that have chunks.
    """

    suite: str
    task_ids: tuple[int, ...]
    assets: str
    image_size: int
    visual_profile: Literal["libero", "fast"] | None
    chunk_len: int

    def task_of(self, index: int) -> int:
        """Return the task of an environment."""
        return self.task_ids[index % len(self.task_ids)]


@dataclass(frozen=True)
class Contender:
    """One system with its number of environments and processes.

    Attributes:
        key: Unique in its scenario.
        label: What tables call it.
        system: What runs.
        num_envs: Environments in all.
        workers: Worker processes; systems other than ours have one an environment.
        env: The environments.
        seed: Seed of the first reset.
    """

    key: str
    label: str
    system: System
    num_envs: int
    workers: int
    env: EnvSpec
    seed: int = 0


@dataclass(frozen=True)
class Target:
    """A figure that is asked for.

    Attributes:
        text: What it is.
        metric: Where it stands in the scenario's results, keys from the outermost in.
        goal: The limit.
        at_most: Whether the figure must not exceed the limit, rather than reach it.
        unit: Unit of figure and limit.
    """

    text: str
    metric: tuple[str, ...]
    goal: float
    at_most: bool = False
    unit: str = "x"


@dataclass(frozen=True)
class Scenario:
    """Contenders that are measured interleaved in one run.

    Attributes:
        key: Unique name.
        title: What tables call it.
        kind: What is measured.
        contenders: In the order of each round.
        baselines: Keys of those that the others are compared with.
        chunks: Action chunks between two resets; for starts: before memory is measured.
        rounds: Measured rounds; None: as the user wants.
        targets: What is asked for.
        notes: Remarks for below its table.
    """

    key: str
    title: str
    kind: Literal["speed", "startup", "overhead", "scaling", "profile"]
    contenders: tuple[Contender, ...]
    baselines: tuple[str, ...] = ("libero",)
    chunks: int = 2
    rounds: int | None = None
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
