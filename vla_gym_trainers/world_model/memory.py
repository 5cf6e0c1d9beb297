"""What a world model remembers of N running episodes, and what it thinks of their steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import torch

from vla_gym_trainers.world_model import rewards
from vla_gym_trainers.world_model.protocol import WorldModel
from vla_gym_trainers.world_model.recorder import StepRecorder


class Seen(NamedTuple):
    """Observations, one a row.

    Attributes:
        views: By camera (n, H, W, 3) uint8.
        instructions: n texts.
        proprio: (n, proprio size) float32.
    """

    views: Mapping[str, np.ndarray]
    instructions: list[str]
    proprio: np.ndarray


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
        """Begin with initial states."""
        self.model = model
        self.recorder: StepRecorder | None = None
        self.states = model.initial_state(num_envs).clone()
        size = (num_envs, model.num_tokens)
        self.tokens = torch.zeros(size, dtype=torch.long, device=self.states.device)
        self.visited: list[set[tuple[int, ...]]] = [set() for _ in range(num_envs)]

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the states (n, S) float32 of some episodes; the caller's own."""
        found: np.ndarray = self.states[torch.from_numpy(ids)].float().cpu().numpy()
        return found

    @torch.no_grad()
    def advance(
        self,
        seen: Seen,
        stepped: np.ndarray,
        begun: np.ndarray,
        actions: np.ndarray,
        wanted: Collection[str] = (),
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Take in observations, in one forward pass.

        Args:
            seen: What was seen after a step in the episodes ``stepped``, then what is seen at the
                beginning of the episodes ``begun``.
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
        action, body = (torch.from_numpy(x).to(device) for x in (last, seen.proprio))
        features = model.features(seen.views, seen.instructions, seen.proprio)
        tokens = model.tokens(seen.views["wrist"])
        if self.recorder is not None:
            own = {"features": features.float().cpu().numpy(), "tokens": tokens.cpu().numpy()}
            self.recorder.take(stepped, begun, {**own, "proprio": seen.proprio, "actions": last})
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
        terms[rewards.COVERAGE] = self._visit(stepped, begun, seen.proprio)
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
