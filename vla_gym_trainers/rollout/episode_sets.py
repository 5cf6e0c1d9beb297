"""Episodes that are played to learn from what is seen in them: recorded, and joined to sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from vla_gym.errors import ConfigError
from vla_gym.rollout import Info, Start, play
from vla_gym.rollout.policies import BATCH_SIZE, Observations, in_episodes, in_fixed_batches
from vla_gym.vla import FrozenVLA
from vla_gym.vla.base import check_output
from vla_gym.vla.stateful import VLAMemory

T = TypeVar("T")


class RecordingPolicy:
    """Plays episodes that a frozen VLA looks at, and keeps rows of what is seen at every chunk.

    A subclass has ``act``, which says whose chunks are played and what is kept, and ``take``, which
    returns what comes of an episode that has ended. See :class:`~vla_gym.rollout.Policy`.
    """

    def __init__(
        self, vla: FrozenVLA, name: str, chunk_len: int, cameras: tuple[str, ...], *wrappers: Any
    ) -> None:
        """Name who acts (``"expert"``: the scripted one) and what wraps its environments."""
        self.vla, self.env_wrappers, self._memory = vla, list(wrappers), VLAMemory(vla)
        self.name, self.expert, self.chunk_len = name, name == "expert", chunk_len
        self.cameras, self.image_size = cameras, vla.image_size
        self.identity: dict[str, Any] = {}
        self._kept: dict[Start, list[dict[str, np.ndarray]]] = {}

    def look(
        self, observations: Observations, infos: Sequence[Info], summary: Callable[[Tensor], Tensor]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the VLA's chunks (n, C, A) for n rows, and a summary of its hidden states."""

        def forward(batch: dict[str, np.ndarray], told: list[Info]) -> tuple[Any, Any]:
            images = {camera: batch[camera] for camera in self.vla.cameras}
            texts = [info["instruction"] for info in told]
            with torch.no_grad():
                out = in_episodes(self._memory, told).infer(images, texts, batch["proprio"])
            out = check_output(self.vla, out, len(texts))
            chunks = out.actions[:, : self.chunk_len].float().clamp(-1.0, 1.0)
            return chunks.cpu().numpy(), summary(out.hidden).cpu().numpy()

        return in_fixed_batches(forward, observations, infos, BATCH_SIZE)

    def keep(self, infos: Sequence[Info], **rows: np.ndarray) -> None:
        """Keep copies of rows (n, ...), by name, for the episodes that they are of."""
        for i, info in enumerate(infos):
            start = Start(info["suite"], info["task_id"], info["init_state_id"], info["seed"])
            if info["elapsed_steps"] == 0:  # perhaps again, after its worker died
                self._kept[start] = []
            self._kept[start].append({name: values[i].copy() for name, values in rows.items()})

    def kept(self, start: Start) -> dict[str, np.ndarray]:
        """Return the rows (T, ...) of an episode that has ended, by name, and forget them."""
        rows = self._kept.pop(start)
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def play_set(
    players: Sequence[Any],
    order: Sequence[tuple[str, Start]],
    what: str,
    *,
    progress: bool,
    **settings: Any,
) -> Any:
    """Let :class:`RecordingPolicy` players play; return what they take of all episodes, joined.

    ``order`` has the start of each episode, with the name of its player; for the settings see
    :func:`vla_gym.rollout.play`.
    """
    found = {}
    with tqdm(total=len(order), desc=what, unit="episode", disable=not progress) as bar:
        for player in players:
            starts = [start for name, start in order if name == player.name]
            for episode in play(player, starts, env_wrappers=player.env_wrappers, **settings):
                found[player.name, episode.start] = player.take(episode.start)
                bar.update()
    return join_episodes([found[key] for key in order])


def join_episodes(parts: Sequence[T]) -> T:
    """Join sets; tasks of the same name become one, episodes get new numbers.

    Args:
        parts: Dataclasses of arrays or tensors (N, ...), among them ``task`` (N,), an index into
            the list ``tasks`` of names, and ``episode`` (N,), a number each.

    Raises:
        ConfigError: If there is none.
    """
    if not parts:
        raise ConfigError("There is nothing to learn from: ask for at least one episode.")
    sets: list[dict[str, Any]] = [dict(vars(part)) for part in parts]
    tasks = list(dict.fromkeys(name for columns in sets for name in columns["tasks"]))
    first = 0
    for columns in sets:
        numbers = np.array([tasks.index(name) for name in columns.pop("tasks")], np.int64)
        columns["task"] = numbers[columns["task"]]
        columns["episode"] = first + np.unique(columns["episode"], return_inverse=True)[1]
        first = int(columns["episode"].max(initial=first - 1)) + 1
    joined = {name: [columns[name] for columns in sets] for name in sets[0]}
    merged = {
        name: torch.cat(column) if isinstance(column[0], torch.Tensor) else np.concatenate(column)
        for name, column in joined.items()
    }
    return dataclasses.replace(parts[0], **merged, tasks=tasks)  # type: ignore[type-var]
