"""Episodes as a world model learns from them: one row an environment step, small numbers only."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_gym.errors import WeightsError
from vla_gym.files import replacing
from vla_gym.suites import Task, get_task

#: Who can have played an episode, and who of them a world model is first trained on.
BEHAVIOURS = ("random", "vla", "expert", "explorer")
COLLECTED = BEHAVIOURS[:3]


@dataclass
class Sequences:
    """N steps, episode after episode; row t of an episode and the row after it are one transition.

    The player of episodes does not show the observation that ends one, so an episode's last row is
    the observation before its last chunk.

    Attributes:
        frames: (N, S, S, 3) uint8, what the wrist camera shows, or of no rows where tokens are all
            that is needed.
        agentview: (N, S, S, 3) uint8, or of no rows where it is not kept: for pictures only.
        features: (N, F) float32, see ``WorldModel.features``.
        proprio: (N, proprio size) float32.
        actions: (N, C * A) float32, the executed chunk that led to the next row; 0 for control
            steps that were not executed, and in the last row of an episode.
        executed: (N,) int64 control steps of it; 0 in the last row of an episode.
        episode: (N,) int64, a number of its own for every episode, ascending.
        behaviour: (N,) int64, index into :data:`BEHAVIOURS`.
        task: (N,) int64, index into ``tasks``.
        objects: (N, M, 3) float32, of each movable object its position in the world frame (m); NaN
            where there is none.
        tokens: (N, P) int64 of ``frames`` by a world model; of no rows until they are known.
        tasks: Names, ``"<suite>_<task_id>"``.
    """

    frames: np.ndarray
    agentview: np.ndarray
    features: np.ndarray
    proprio: np.ndarray
    actions: np.ndarray
    executed: np.ndarray
    episode: np.ndarray
    behaviour: np.ndarray
    task: np.ndarray
    objects: np.ndarray
    tokens: np.ndarray
    tasks: list[str]

    def __len__(self) -> int:
        return len(self.episode)

    def bounds(self) -> np.ndarray:
        """Return the first row of each episode and the one after its last, (E, 2) int64."""
        first = np.flatnonzero(np.diff(self.episode, prepend=-1))
        return np.stack([first, np.append(first[1:], len(self))], axis=1).astype(np.int64)

    def transitions(self) -> np.ndarray:
        """Return the rows (n,) that a chunk was executed in and whose next row is known."""
        return np.flatnonzero(self.executed > 0)

    def last_actions(self) -> np.ndarray:
        """Return what led to each row, (N, C * A): zeros in an episode's first row."""
        last = np.zeros_like(self.actions)
        last[1:] = self.actions[:-1]
        last[self.bounds()[:, 0]] = 0.0
        return last

    def since(self, row: int) -> Sequences:
        """Return the rows from an episode's first one on."""
        # Pictures may have been left out: they stay of no rows.
        return dataclasses.replace(self, **{name: getattr(self, name)[row:] for name in _COLUMNS})

    def without_frames(self) -> Sequences:
        """Return the same without pictures: a model is trained by tokens."""
        return dataclasses.replace(self, frames=self.frames[:0], agentview=self.agentview[:0])

    def save(self, path: Path) -> None:
        """Write an .npz file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as draft, open(draft, "wb") as file:
            arrays = {name: getattr(self, name) for name in _COLUMNS}
            np.savez(file, **arrays, tasks=np.array(self.tasks))

    @classmethod
    def load(cls, path: Path) -> Sequences:
        """Read what :meth:`save` wrote.

        Raises:
            WeightsError: If the file is missing, damaged or another one.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in _COLUMNS}
                return cls(**arrays, tasks=[str(name) for name in file["tasks"]])
        except Exception as error:  # OS, zip, key and value errors alike
            raise WeightsError(
                f"{path} holds no sequences of a world model ({error}): collect them again, in a "
                "new --run-dir."
            ) from error


def named_task(key: str) -> Task:
    """Return the task of that name, ``"<suite>_<task_id>"``."""
    suite, _, number = key.rpartition("_")
    return get_task(suite, int(number))


_COLUMNS = tuple(f.name for f in dataclasses.fields(Sequences) if f.name != "tasks")
