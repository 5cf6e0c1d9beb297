"""What a world model remembers of N running episodes, thinks of their steps, and keeps of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch

from vla_gym_trainers.world_model import rewards
from vla_gym_trainers.world_model.data import BEHAVIOURS, Sequences
from vla_gym_trainers.world_model.protocol import WorldModel

Row = dict[str, np.ndarray]


class StepRecorder:
    """Episodes of N environments as they are played, without pictures, to learn from.

    Nothing is computed for it: features and tokens are those that the memory was updated with. A
    row is an observation, the one that ends an episode included.
    """

    def __init__(self, chunk_len: int) -> None:
        self._chunk_len = chunk_len
        self._running: dict[int, list[Row]] = {}
        self._over: list[list[Row]] = []

    def take(self, stepped: np.ndarray, begun: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """Keep rows; an episode is over where another one begins.

        ``stepped`` (n,) and ``begun`` (m,) are as in :meth:`.memory.WorldMemory.advance`, rows are
        ``features``, ``tokens``, ``proprio`` and ``actions`` of n + m.
        """
        for row, i in enumerate(stepped.tolist()):
            self._running[i][-1]["actions"] = rows["actions"][row].copy()
            self._running[i].append(self._row(rows, row))
        for row, i in enumerate(begun.tolist(), len(stepped)):
            self._over.append(self._running.pop(i, []))
            self._running[i] = [self._row(rows, row)]

    def _row(self, rows: Mapping[str, np.ndarray], row: int) -> Row:
        kept = {name: rows[name][row].copy() for name in ("features", "tokens", "proprio")}
        return {**kept, "actions": np.zeros_like(rows["actions"][row])}

    def pop(self) -> Sequences | None:
        """Return the episodes that are over and forget them; None if none has a step.

        One in which a number is not finite is left out: a model would learn nothing else any more.
        """
        over = [episode for episode in self._over if len(episode) > 1 and _is_finite(episode)]
        self._over = []
        if not over:
            return None
        rows = [row for episode in over for row in episode]
        columns = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        lengths, nothing = [len(episode) for episode in over], np.zeros(len(rows), np.int64)
        chunks = columns["actions"].reshape(len(rows), self._chunk_len, -1)
        # Control steps that were not executed are 0; so may others be, but hardly a whole chunk.
        executed = np.maximum((chunks != 0.0).any(axis=2).sum(axis=1), 1)
        executed[np.cumsum(lengths) - 1] = 0
        return Sequences(
            **columns,
            frames=np.zeros((0, 1, 1, 3), np.uint8),
            agentview=np.zeros((0, 1, 1, 3), np.uint8),
            executed=executed.astype(np.int64),
            episode=np.repeat(np.arange(len(over)), lengths),
            behaviour=np.full(len(rows), BEHAVIOURS.index("explorer")),
            task=nothing,
            objects=np.full((len(rows), 0, 3), np.nan, np.float32),
            tasks=[""],
        )


def _is_finite(episode: list[Row]) -> bool:
    return all(bool(np.isfinite(value).all()) for row in episode for value in row.values())


class WorldMemory:
    """The states of N episodes and the tokens of their last wrist frames.

    Attributes:
        model: The world model; it learns nothing here.
        recorder: Is told what was taken in, or None.
        states: (N, S).
        tokens: (N, P) int64.
        visited: By episode, the cells of the end effector so far (:func:`.rewards.cells`).
    """

    def __init__(self, model: WorldModel, num_envs: int) -> None:
        self.model = model
        self.recorder: StepRecorder | None = None
        self.states = model.initial_state(num_envs).clone()
        size = (num_envs, model.num_tokens)
        self.tokens = torch.zeros(size, dtype=torch.long, device=self.states.device)
        self.visited: list[set[tuple[int, ...]]] = [set() for _ in range(num_envs)]

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the states (n, S) float32 of some episodes; the caller's own."""
        return self.states[torch.from_numpy(ids)].float().cpu().numpy()

    @torch.no_grad()
    def advance(
        self,
        views: Mapping[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        stepped: np.ndarray,
        begun: np.ndarray,
        actions: np.ndarray,
        wanted: Collection[str] = (),
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Take in observations, in one forward pass.

        Their rows are what was seen after a step in the episodes ``stepped``, then what is seen at
        the beginning of the episodes ``begun``.

        Args:
            views: By camera (n + m, H, W, 3) uint8.
            instructions: n + m texts.
            proprio: (n + m, proprio size) float32.
            stepped: (n,) int64 numbers of episodes.
            begun: (m,) int64; those that are among ``stepped``, too, have ended with that step.
            actions: (n, C * A) float32 of the steps; 0 where a control step was not executed.
            wanted: Names of the model's reward terms that are to be computed.

        Returns:
            The states (n, S) float32 after the steps, and the terms (n,) float64 by name.
        """
        model, count, device = self.model, len(stepped), self.states.device
        last = np.concatenate([actions, np.zeros((len(begun), actions.shape[1]), np.float32)])
        played, fresh = torch.from_numpy(stepped), torch.from_numpy(begun)
        before = torch.cat([self.states[played], model.initial_state(len(begun))])
        action, body = (torch.from_numpy(x).to(device) for x in (last, proprio))
        features = model.features(views, instructions, proprio)
        tokens = model.tokens(views["wrist"])
        if self.recorder is not None:
            own = {"features": features.float().cpu().numpy(), "tokens": tokens.cpu().numpy()}
            self.recorder.take(stepped, begun, {**own, "proprio": proprio, "actions": last})
        after = model.update(before, features, body, action)
        found: dict[str, torch.Tensor] = {}
        if count and rewards.DIVERGENCE in wanted:
            found[rewards.DIVERGENCE] = rewards.memory_divergence(before[:count], after[:count])
        if count and {rewards.UNCERTAINTY, rewards.ERROR} & set(wanted):
            logits = model.logits(before[:count], self.tokens[played], action[:count])
            found[rewards.UNCERTAINTY] = rewards.uncertainty(logits)
            found[rewards.ERROR] = rewards.prediction_error(logits, tokens[:count])
        self.states[played], self.tokens[played] = after[:count], tokens[:count]
        self.states[fresh], self.tokens[fresh] = after[count:], tokens[count:]
        terms = {name: value.double().cpu().numpy() for name, value in found.items()}
        terms[rewards.COVERAGE] = self._visit(stepped, begun, proprio)
        return after[:count].float().cpu().numpy(), terms

    def _visit(self, stepped: np.ndarray, begun: np.ndarray, proprio: np.ndarray) -> np.ndarray:
        """Note where arms are; return (n,) 1 where a step led to a cell new in its episode."""
        places = proprio[:, :3]
        known = np.isfinite(places).all(axis=1)
        cells = rewards.cells(np.where(known[:, None], places, 0.0))
        seen = [
            {tuple(cell)} if k else set() for cell, k in zip(cells.tolist(), known, strict=True)
        ]
        new = np.zeros(len(stepped))
        for row, i in enumerate(stepped.tolist()):
            new[row] = len(seen[row] - self.visited[i])
            self.visited[i] |= seen[row]
        for row, i in enumerate(begun.tolist(), len(stepped)):
            self.visited[i] = seen[row]
        return new
