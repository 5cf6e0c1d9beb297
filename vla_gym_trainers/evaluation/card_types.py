"""What result cards and logs must hold, for :func:`vla_gym.outside.to_type`.

Only what is read again is here; a card may hold more.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from vla_gym.outside import ChunkLength, Count, NonNegativeFloat, Object

Scalar = bool | int | float | str | None
Number = int | float
#: Tasks of a suite; official states of a task.
TaskIds = Annotated[list[Annotated[int, Meta(ge=0, lt=10_000)]], Meta(max_length=10_000)]
States = Annotated[int, Meta(ge=1, le=100_000)]
Rate = Annotated[float, Meta(ge=0.0, le=1.0)]
Seed = Annotated[int, Meta(ge=0)] | None


class Point(Struct, array_like=True):
    """A row that begins with a step and a value."""

    step: Number
    value: Number


class VLAIdentity(Struct):
    """Which VLA."""

    name: str
    options: dict[str, Scalar | list[Any]] = {}

    def __post_init__(self) -> None:
        """Check the digest of adapters, which is shortened for tables."""
        if not isinstance(self.options.get("adapters", ""), str):
            raise ValueError("Expected the digest of the adapters as a text")


class VLAPlayer(Struct, tag_field="kind", tag="vla"):
    """A VLA that played."""

    vla: VLAIdentity
    head: str
    temperature: float = 0.0
    seed: Seed = None
    phrasing: str = "original"
    run: str | None = None


class TrainedPlayer(Struct, tag_field="kind", tag="trained"):
    """A trained policy that played."""

    sha256: str
    vla: VLAIdentity
    seed: Seed = None


class RandomPlayer(Struct, tag_field="kind", tag="random"):
    """Random actions."""

    seed: Seed


class Expert(Struct, tag_field="kind", tag="expert"):
    """The scripted expert."""


Player = VLAPlayer | TrainedPlayer | RandomPlayer | Expert


class Pack(Struct):
    """An asset pack."""

    name: str
    digest: str


class Protocol(Struct):
    """What was played, by whom, how."""

    policy: Player
    tasks: Annotated[dict[str, TaskIds], Meta(max_length=1000)]
    episodes: States
    assets: Pack
    chunk_len: ChunkLength | None
    confusion: bool
    scene_reset_interval: Annotated[int, Meta(ge=1)] | None = None
    first_seed: Seed = None


class EpisodeRow(Struct):
    """One episode; see :class:`vla_gym.rollout.Episode`."""

    suite: str
    task_id: Count
    init_state_id: Annotated[int, Meta(ge=-1)]
    success: bool
    terminated: bool
    truncated: bool
    length: Count
    achieved: Count | None = None
    achieved_step: Count | None = None
    seed: Annotated[int, Meta(ge=0)] = 0
    replays: Count = 0


class Counts(Struct):
    """Successes of a task, a suite or all."""

    num_episodes: Count
    num_successes: Count


class TaskCounts(Counts):
    """Of a task."""

    suite: str
    task_id: Count
    instruction: str


class TotalCounts(Counts):
    """Of all tasks."""

    mean_over_tasks: Rate


class Comparison(Struct):
    """State by state, with another policy."""

    wins: Count
    losses: Count
    both: Count
    p_value: Rate


class Paired(Struct):
    """A comparison with another policy, by task and in total."""

    tasks: list[Comparison]
    total: Comparison


def check_tasks_paired(tasks: list[TaskCounts], paired: Paired | None) -> None:
    """Raise ValueError if a comparison has more or fewer tasks than there are."""
    if paired is not None and len(paired.tasks) != len(tasks):
        raise ValueError(f"paired has {len(paired.tasks)} tasks, the results have {len(tasks)}")


class PairedCard(Paired, kw_only=True):
    """The same in a card of an evaluation."""

    policy: Player
    with_: str = field(name="with")


class Outcome(Struct):
    """The results of one policy."""

    tasks: list[TaskCounts]
    total: TotalCounts
    paired: Paired

    def __post_init__(self) -> None:
        """Check that the comparison is of the same tasks."""
        check_tasks_paired(self.tasks, self.paired)


class Evaluation(Struct, frozen=True):
    """Of a trained policy, at the end of its run."""

    policy: Outcome | None = None


class Guard(Struct, frozen=True):
    """Which tasks the VLA plays in place of the policy."""

    guarded_tasks: TaskIds = []


class History(Struct, frozen=True):
    """Step, success and more at each validation."""

    history: list[Point] = []


class Training(Struct, frozen=True):
    """What training came to."""

    chunks: Count | None = None
    env_steps: Count | None = None
    episodes: Count | None = None
    minutes: Annotated[float, Meta(ge=0.0)] = 0.0
    success: list[Point] = []
    closed_loop: History = History()
    staleness_chunks: dict[Annotated[str, Meta(pattern="^[0-9]{1,9}$")], Count] = {}


class TrainingResults(Struct):
    """The results of a training run."""

    training: Training = Training()
    validation: History = History()
    guard: Guard = Guard()
    evaluation: Evaluation = Evaluation()


class RunConfig(Struct):
    """What a report needs of a run's settings."""

    suite: str = "?"
    task_ids: TaskIds | None = None
    eval_layouts: Count = 0


class TrainingCard(Struct):
    """A card of a training run."""

    kind: str
    config: RunConfig
    environment: Object
    versions: Object
    seeds: Object
    results: TrainingResults


class LogRow(Struct, rename=lambda name: name.replace("__", "/")):
    """A line of ``metrics.jsonl``: more numbers and texts beside these."""

    step: Number
    wall_s: Number
    time__seconds: Number | None = None
    time__time_elapsed: Number | None = None
    time__total_env_steps: Number = 0
    time__rollout: Number | None = None
    time__forward: Number | None = None
    time__learn: Number | None = None
    time__wait: Number | None = None
    time__episodes: NonNegativeFloat = 0.0
    rollout__episodes: NonNegativeFloat = 0.0
    rollout__success: Rate | None = None
    rollout__success_rate: Rate | None = None
    eval__success: Rate | None = None


class EvalResults(Struct):
    """The results of an evaluation."""

    episodes: list[EpisodeRow]
    tasks: list[TaskCounts]
    total: TotalCounts
    paired: PairedCard | None = None

    def __post_init__(self) -> None:
        """Check that the comparison is of the same tasks."""
        check_tasks_paired(self.tasks, self.paired)


class World(Struct):
    """Where an evaluation ran."""

    # Of merged cards.
    gl_renderers: list[str | None] = []
    machines: list[Object] = []


class EvalCardContent(Struct):
    """A card of ``vla-gym eval``."""

    kind: Literal["eval"]
    schema: Literal[2]
    environment: World
    versions: dict[str, str | None]
    protocol: Protocol
    results: EvalResults
    seeds: Object = {}
    wall_seconds: Annotated[float, Meta(ge=0.0)] = 0.0


class EvalLine(Struct):
    """A line of an evaluation that runs."""

    episode: EpisodeRow
    seconds: Annotated[float, Meta(ge=0.0)]
    world: Object = {}
