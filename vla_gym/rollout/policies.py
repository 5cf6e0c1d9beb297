"""Who acts in episodes: one method, ``act(observations, infos) -> chunks``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

import numpy as np

from vla_gym.suites import get_suite

if TYPE_CHECKING:
    from vla_gym.vla.base import FrozenVLA
    from vla_gym.vla.stateful import VLAMemory

#: Rows of each forward pass of a VLA. The rounding of its actions depends on it: everything that
#: plays episodes takes this number if it is given none, so that the same policy acts the same.
BATCH_SIZE = 4
Observations = Mapping[str, np.ndarray]


class Info(TypedDict):
    """What a policy is told about a row besides its observation.

    An environment plays one episode at a time: ``env_id`` says which episode a row belongs to, and
    where ``elapsed_steps`` is 0 a new one begins (or an old one again, after its worker died).
    """

    env_id: int
    suite: str
    task_id: int
    init_state_id: int
    seed: int
    instruction: str
    elapsed_steps: int


class Policy(Protocol):
    """Anything that can play episodes.

    Attributes:
        name: What tables call it.
        chunk_len: Rows of a chunk.
        cameras: What it must see; empty: only ``proprio`` and ``task_id``.
        image_size: Height and width of the images in pixels.
        expert: The scripted expert acts in the worker; what ``act`` returns is ignored.
        identity: What its results depend on, as plain JSON types; results of policies with the
            same identity may be merged.

    One that must observe more than the environments tell has ``wrap_envs`` as well, which puts a
    vector wrapper around them.
    """

    name: str
    chunk_len: int
    cameras: tuple[str, ...]
    image_size: int
    expert: bool
    identity: dict[str, Any]

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:
        """Choose the next chunks.

        A row of the result must depend on its own observation and info alone, bit for bit, or on
        those of its own episode so far: which rows come together depends on timing.

        Args:
            observations: As ``Libero-*``, n rows each.
            infos: One for each row.

        Returns:
            (n, chunk_len, action size) within the bounds of the suite's actions.
        """


class ExpertPolicy:
    """The scripted expert; it acts in the worker, where it sees the simulation."""

    name, expert, image_size = "expert", True, 128
    cameras: tuple[str, ...] = ()

    def __init__(self, chunk_len: int = 8) -> None:
        """Choose how many control steps a call executes; the episodes do not depend on it."""
        self.chunk_len = chunk_len
        self.identity: dict[str, Any] = {"kind": "expert"}

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:  # noqa: ARG002
        """Return chunks that are ignored."""
        size = get_suite(infos[0]["suite"]).action.size
        return np.zeros((len(infos), self.chunk_len, size), np.float32)


class RandomPolicy:
    """Uniform random actions, a function of seed, start and control step."""

    name, expert, image_size = "random", False, 128
    cameras: tuple[str, ...] = ()

    def __init__(self, seed: int = 0, chunk_len: int = 8) -> None:
        self.seed, self.chunk_len = seed, chunk_len
        self.identity: dict[str, Any] = {"kind": "random", "seed": seed}

    def act(self, observations: Observations, infos: Sequence[Info]) -> np.ndarray:  # noqa: ARG002
        """Return uniform chunks."""
        rows = []
        for info in infos:
            action = get_suite(info["suite"]).action
            rng = np.random.default_rng(episode_key(self.seed, info))
            rows.append(rng.uniform(action.low, action.high, (self.chunk_len, action.size)))
        return np.array(rows, np.float32)


def episode_key(seed: int, info: Info) -> list[int]:
    """Return what a random choice depends on: a seed, the start and the control step."""
    suite = zlib.crc32(info["suite"].encode())
    state = info["init_state_id"]
    start = [state] if state >= 0 else [0, info["seed"]]
    return [seed, suite, info["task_id"], *start, info["elapsed_steps"]]


def in_episodes(memory: VLAMemory, infos: Sequence[Info]) -> FrozenVLA:
    """Return the VLA for one look at rows; a stateful one goes on with their episodes."""
    begins = [info["elapsed_steps"] == 0 for info in infos]
    return memory.at([info["env_id"] for info in infos], begins)


def in_fixed_batches(
    forward: Callable[[dict[str, np.ndarray], list[Info]], Any],
    observations: Observations,
    infos: Sequence[Info],
    batch_size: int,
) -> Any:
    """Run a network on rows in batches that all have one size and one instruction.

    Matrix products round differently for other batch sizes, and attention for other padded
    lengths: a chunk changes in its last bits, and a long episode with contacts may end otherwise.
    In batches of one size, filled up with copies of a row, and one instruction, a row's result
    depends on that row alone. Episodes come task by task, so nearly always all rows that are ready
    fit into one forward pass.

    Args:
        forward: From observations of ``batch_size`` rows and their infos, which have one
            instruction, to an array (batch_size, ...) or a tuple of some; row i must not depend on
            what the other rows show.
        observations: n rows each.
        infos: One for each row.
        batch_size: Rows of a forward pass.

    Returns:
        (n, ...), or a tuple of such arrays.
    """
    rows_of: dict[str, list[int]] = {}
    for row, info in enumerate(infos):
        rows_of.setdefault(info["instruction"], []).append(row)
    found: list[tuple[np.ndarray, ...]] = [()] * len(infos)
    for rows in rows_of.values():
        for first in range(0, len(rows), batch_size):
            real = rows[first : first + batch_size]
            batch = real + [real[0]] * (batch_size - len(real))
            shown = {key: value[batch] for key, value in observations.items()}
            out = forward(shown, [infos[row] for row in batch])
            arrays = out if isinstance(out, tuple) else (out,)
            for k, row in enumerate(real):
                found[row] = tuple(np.array(array[k]) for array in arrays)
    result = tuple(np.stack(column) for column in zip(*found, strict=True))
    return result if isinstance(out, tuple) else result[0]
