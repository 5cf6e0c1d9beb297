"""What training a world model changes from step to step, and its part of a checkpoint."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vla_gym_trainers.runs.run_dir import Checkpoint, restoring
from vla_gym_trainers.runs.torch_helpers import load_tensors, save_tensors, set_cosine_rate
from vla_gym_trainers.world_model.config import WorldModelConfig
from vla_gym_trainers.world_model.data import Sequences
from vla_gym_trainers.world_model.losses import Window, window_loss
from vla_gym_trainers.world_model.model import GRUWorldModel, WorldModelSizes
from vla_gym_trainers.world_model.windows import Windows

#: Of a checkpoint of F1's phases: what of the world model a phase trains (``model``, ...), its
#: ``optimizer`` and more tensors, by name.
F1_FILE = "f1.pt"
#: Frames that are tokenised in one forward pass.
BATCH = 128


class Teacher:
    """The tokenizer, then the model, in training: :meth:`step` until the config's total is reached.

    Attributes:
        model: The model.
        train: Training sequences.
        steps: Optimiser steps taken, the tokenizer's first.
        windows: What the model's batches are made of; None while the tokenizer trains.
    """

    def __init__(
        self,
        config: WorldModelConfig,
        train: Sequences,
        sizes: WorldModelSizes,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Begin with fresh weights, or where a checkpoint was written.

        Raises:
            WeightsError: If the checkpoint is damaged.
        """
        self.config, self.train, self.steps = config, train, 0
        torch.manual_seed(config.seed)
        self.model = GRUWorldModel(sizes)
        self.model.fit_scale(train.features, train.proprio)
        self.model.to(config.device)
        # Of the tokenizer's batches and codes.
        self._generator = torch.Generator().manual_seed(config.seed)
        self.windows: Windows | None = None
        if checkpoint is not None:
            self._restore(checkpoint)
        else:
            self._optimizer = self._new_optimizer()

    @property
    def is_tokenizing(self) -> bool:
        """Whether the tokenizer is what trains."""
        return self.steps < self.config.tokenizer_steps

    def _new_optimizer(self) -> torch.optim.Optimizer:
        """Make the optimiser of what trains now; the tokenizer is frozen once the model trains."""
        config, tokenizer = self.config, self.model.tokenizer
        tokenizer.requires_grad_(self.is_tokenizing)
        if self.is_tokenizing:
            return torch.optim.Adam(tokenizer.parameters(), lr=config.tokenizer_learning_rate)
        self.model.eval()
        self.train.tokens = tokenised(self.model, self.train)
        self.windows = Windows(
            self.train,
            config.bptt_length,
            config.batch_size,
            self.model.state_size,
            config.seed,
            sequential=config.sequential_training,
        )
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)

    # Training

    def step(self) -> dict[str, float]:
        """Take one optimiser step; return its metrics."""
        self.model.train()
        losses = self._tokenizer_loss() if self.is_tokenizing else self._model_loss()
        rate = self._set_learning_rate()
        self._optimizer.zero_grad()
        losses["loss"].backward()
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        self._optimizer.step()
        name = "tokenizer" if self.is_tokenizing else "train"
        metrics = {f"{name}/{key}": float(value.detach()) for key, value in losses.items()}
        metrics |= {f"{name}/grad_norm": float(norm), f"{name}/learning_rate": rate}
        self.steps += 1
        if self.steps == self.config.tokenizer_steps:
            self._optimizer = self._new_optimizer()
        return metrics

    def _tokenizer_loss(self) -> dict[str, Tensor]:
        size, frames = (self.config.tokenizer_batch_size,), self.train.frames
        rows = torch.randint(len(frames), size, generator=self._generator).numpy()
        batch = torch.from_numpy(frames[rows]).to(self.config.device)
        return self.model.tokenizer.loss(batch, self._generator, self.config.commitment)

    def _model_loss(self) -> dict[str, Tensor]:
        assert self.windows is not None
        window, state = self.windows.next()
        window = Window(*(value.to(self.config.device) for value in window))
        loss, accuracy, states = window_loss(self.model, window, state.to(self.config.device))
        self.windows.keep(states)
        return {"loss": loss, "accuracy": accuracy}

    def _set_learning_rate(self) -> float:
        config, first = self.config, self.config.tokenizer_steps
        step, total, peak = self.steps - first, config.steps, config.learning_rate
        if self.is_tokenizing:
            step, total, peak = self.steps, first, config.tokenizer_learning_rate
        return set_cosine_rate(self._optimizer, step, total, peak=peak, warmup=50)

    # Checkpoints

    def plain(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is plain data."""
        windows = None if self.windows is None else self.windows.state()[0]
        return {"sizes": asdict(self.model.sizes), "windows": windows}

    def save(self, folder: Path) -> None:
        """Write the tensors into a checkpoint's folder."""
        save_tensors(
            folder / F1_FILE,
            {
                "model": self.model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "generator": self._generator.get_state(),
                "windows": {} if self.windows is None else self.windows.state()[1],
            },
        )

    def _restore(self, checkpoint: Checkpoint) -> None:
        tensors = load_tensors(checkpoint.folder / F1_FILE)
        self.steps = checkpoint.step
        with restoring(checkpoint.folder):
            self.model.load_state_dict(tensors["model"])
            self._optimizer = self._new_optimizer()  # with the tokens of the weights just loaded
            self._optimizer.load_state_dict(tensors["optimizer"])
            self._generator.set_state(tensors["generator"])
            if self.windows is not None:
                self.windows.restore(checkpoint.state["windows"], tensors["windows"])


def tokenised(model: GRUWorldModel, data: Sequences) -> Any:
    """Return the tokens (N, P) int64 of all frames, batch by batch."""
    parts = [model.tokens(data.frames[i : i + BATCH]) for i in range(0, len(data), BATCH)]
    return torch.cat(parts).cpu().numpy()
