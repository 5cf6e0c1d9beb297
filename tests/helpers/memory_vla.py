"""A stateful VLA: the embedded one, with a GRU over what it saw in the episode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vla_gym.vla import StatefulVLA, VLAOutput
from vla_gym.vla.mini.backend import MiniBackend

STATE = 16


class GRUVLA(StatefulVLA):
    """Hidden states and actions of mini, moved by the state of a GRU; weights by a seed.

    The state also counts the frames that it has seen. ``row_by_row`` looks at one row after the
    other, so that results are the same bit for bit in whatever batch.
    """

    def __init__(self, mini: MiniBackend, *, seed: int = 0, row_by_row: bool = False) -> None:
        self._mini, self._row_by_row = mini, row_by_row
        self.name = f"{mini.name}-gru"
        self.horizon, self.num_hidden_tokens = mini.horizon, mini.num_hidden_tokens
        self.hidden_size, self.image_size = mini.hidden_size, mini.image_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.gru = nn.GRUCell(mini.hidden_size, STATE)
            self.to_hidden = nn.Linear(STATE, mini.hidden_size)
            self.to_action = nn.Linear(STATE, 6)

    @classmethod
    def from_pretrained(cls, folder: Path, *, row_by_row: bool = False, **options: Any) -> GRUVLA:
        seed = options.pop("seed", 0)
        mini = MiniBackend.from_pretrained(folder, **options)
        return cls(mini, seed=seed, row_by_row=row_by_row)

    def initial_state(self, n: int) -> dict[str, torch.Tensor]:
        return {"h": torch.zeros(n, STATE), "frames": torch.zeros(n, dtype=torch.int64)}

    @torch.no_grad()
    def infer_with_state(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        state: dict[str, torch.Tensor],
    ) -> tuple[VLAOutput, dict[str, torch.Tensor]]:
        count = len(instructions)
        if self._row_by_row and count > 1:
            parts = []
            for row in range(count):
                part = slice(row, row + 1)
                seen = {name: rows[part] for name, rows in images.items()}
                before = {name: rows[part] for name, rows in state.items()}
                parts.append(self.infer_with_state(seen, instructions[part], proprio[part], before))
            hidden, actions = (torch.cat([output[k] for output, _ in parts]) for k in range(2))
            after = {name: torch.cat([s[name] for _, s in parts]) for name in state}
            return VLAOutput(hidden, actions), after
        hidden, actions = self._mini.infer(images, instructions, proprio)
        h = self.gru(hidden.mean(dim=1), state["h"])
        moved = actions.clone()
        moved[..., :6] += 0.5 * torch.tanh(self.to_action(h))[:, None]
        after = {"h": h, "frames": state["frames"] + 1}
        return VLAOutput(hidden + self.to_hidden(h)[:, None], moved.clamp(-1.0, 1.0)), after
