"""The world model's part of phase 3: a replay of the explorer's steps, and gradient steps on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from vla_gym_trainers.explorer.config import AdversarialConfig
from vla_gym_trainers.rollout.episode_sets import join_episodes
from vla_gym_trainers.runs.run_dir import Checkpoint, restoring
from vla_gym_trainers.runs.torch_helpers import load_tensors, save_tensors
from vla_gym_trainers.world_model.behaviours import step_terms
from vla_gym_trainers.world_model.data import Sequences
from vla_gym_trainers.world_model.evaluate import memory_states
from vla_gym_trainers.world_model.losses import Window, window_loss
from vla_gym_trainers.world_model.model import GRUWorldModel
from vla_gym_trainers.world_model.rewards import ERROR
from vla_gym_trainers.world_model.teacher import F1_FILE
from vla_gym_trainers.world_model.windows import Windows

_REPLAY = "replay.npz"
_WINDOWS = 9  # sets these draws apart from other uses of the run's seed


class WorldModelUpdates:
    """Trains a world model on what an explorer does; the tokenizer stays, and so do all tokens.

    Windows are drawn at random, and begin with the memory that the model has there at the
    beginning of the cycle.

    Attributes:
        model: Changed in place.
        replay: The explorer's steps, the oldest first; None before the first ones.
    """

    def __init__(
        self, model: GRUWorldModel, config: AdversarialConfig, taught: Sequences | None
    ) -> None:
        """Begin with an empty replay; windows are drawn from phase 1's data, too, if given."""
        self.model, self.config, self._taught = model, config, taught
        self.replay: Sequences | None = None
        own = [p for name, p in model.named_parameters() if not name.startswith("tokenizer.")]
        for parameter in own:
            parameter.requires_grad_(True)
        self._parameters = own
        self._optimizer = torch.optim.AdamW(
            own, lr=config.world_learning_rate, weight_decay=config.world_weight_decay
        )

    def cycle(self, new: Sequences | None, number: int) -> dict[str, float]:
        """Take in new episodes, with tokens, and take the gradient steps of a cycle.

        The cycle's number sets the draws. Returns metrics, see docs/f1.md.
        """
        metrics: dict[str, float] = {}
        if new is not None:
            self.replay = trimmed([*filter(None, [self.replay]), new], self.config.replay_steps)
            metrics["world_model/error_before"] = self._error(new)
        sources = self._sources(number)
        losses = [self._step(sources) for _ in range(self.config.world_updates if sources else 0)]
        for name in losses[0] if losses else ():
            metrics[f"world_model/{name}"] = float(np.mean([loss[name] for loss in losses]))
        if new is not None:
            metrics["world_model/error_after"] = self._error(new)
        steps = 0 if self.replay is None else len(self.replay.transitions())
        metrics["world_model/replay_steps"] = float(steps)
        return metrics

    def _error(self, data: Sequences) -> float:
        """Return the mean prediction error, as in the rewards, of all steps."""
        return float(step_terms(self.model, data, data.transitions())[ERROR].mean())

    def _sources(self, number: int) -> list[Windows]:
        """Return where this cycle's windows come from; none while no episode is long enough."""
        config, batch = self.config, self.config.world_batch_size
        length = config.world_bptt_length
        if self.replay is None or np.diff(self.replay.bounds()).max() <= length:
            return []
        share = 0 if self._taught is None else round(batch * config.teacher_share)
        parts = [(self.replay, batch - share), (self._taught, share)]
        seeds = np.random.SeedSequence([config.seed, _WINDOWS, number]).generate_state(2)
        sources = []
        for seed, (data, size) in zip(seeds.tolist(), parts, strict=True):
            if data is not None and size:
                shape = length, size, self.model.state_size
                sources.append(Windows(data, *shape, seed, sequential=False))
                sources[-1].store(memory_states(self.model, data).cpu())
        return sources

    def _step(self, sources: list[Windows]) -> dict[str, float]:
        """Take one gradient step on windows of all sources; return its metrics."""
        drawn = [source.next() for source in sources]
        device = self._parameters[0].device
        columns = zip(*(window for window, _ in drawn), strict=True)
        window = Window(*(torch.cat(column).to(device) for column in columns))
        state = torch.cat([before for _, before in drawn]).to(device)
        self.model.train()  # cuDNN has no gradients of a GRU otherwise
        loss, accuracy, _ = window_loss(self.model, window, state)
        self.model.eval()
        self._optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        found = {"loss": loss.detach(), "accuracy": accuracy, "grad_norm": norm}
        return {name: float(value) for name, value in found.items()}

    # Checkpoints

    def save(self, folder: Path) -> None:
        """Write model, optimiser and replay into a checkpoint's folder."""
        tensors = {"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict()}
        save_tensors(folder / F1_FILE, tensors)
        if self.replay is not None:
            self.replay.save(folder / _REPLAY)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint.

        Raises:
            WeightsError: If it is damaged.
        """
        tensors = load_tensors(checkpoint.folder / F1_FILE)
        with restoring(checkpoint.folder):
            self.model.load_state_dict(tensors["model"])
            self._optimizer.load_state_dict(tensors["optimizer"])
        path = checkpoint.folder / _REPLAY
        self.replay = Sequences.load(path) if path.is_file() else None


def trimmed(parts: list[Sequences], steps: int) -> Sequences:
    """Join sequences and leave out the oldest episodes until at most so many steps are left.

    The newest episode stays in any case.
    """
    data = join_episodes(parts)
    starts = data.bounds()[:, 0]
    rows = len(data) - starts  # from there on; an episode has one more than steps
    fitting = starts[rows - np.arange(len(starts), 0, -1) <= steps]
    return data.since(int(fitting[0]) if len(fitting) else int(starts[-1]))
