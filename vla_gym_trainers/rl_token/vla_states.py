"""A VLA's hidden states along episodes, and what is true in the scene at each of them.

Episodes are played by the scripted experts with noise, as ``vla-gym demos`` plays them, and by the
VLA itself with noise. All start from layouts drawn by LIBERO's rules, never from the 50 official
states, which stay for evaluation.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vla_gym.errors import ConfigError
from vla_gym.outside import Count, Fraction, PositiveInt
from vla_gym.suites import choose_suite
from vla_gym.vla import FrozenVLA
from vla_gym.vla.base import CAMERAS, check_output
from vla_gym.vla.stateful import VLAMemory
from vla_gym_trainers.runs.tasks import SuitesSettings

PLAYERS = ("demos", "expert", "vla")
# Observations in one forward of the VLA.
BATCH = 32


@dataclass
class StatesConfig(SuitesSettings):
    """Which states are visited; options of the commands that need them."""

    suites: tuple[str, ...] = ("spatial", "object", "goal")
    """Suites whose tasks are played."""
    bddl_path: tuple[Path, ...] | None = None
    """In place of suites: BDDL files of your own, or folders of them, which no expert plays
    (expert_episodes 0); see docs/environments.md."""
    expert_episodes: Count = 6
    """Episodes a task of the scripted expert with noise, on sampled layouts."""
    expert_noise: Fraction = 0.15
    """Noise on its executed actions, as in ``vla-gym demos``."""
    frame_stride: PositiveInt = 4
    """The VLA looks at every so many frames of expert episodes; neighbours hardly differ."""
    rollout_episodes: Count = 4
    """Episodes a task of the VLA itself with noise, on other sampled layouts."""
    rollout_noise: Fraction = 0.15
    """Noise on its executed actions, so that states beside the VLA's path are known too."""
    num_workers: Count = 0
    """Processes that simulate; the VLA runs in this one. 0: none but this one. With hosts: on each
    of them."""
    seed: Count = 0
    """Seed of layouts, noise, weights and batches; an episode is a function of it, the task and
    its number, whatever the worker count."""
    device: str = "cpu"
    """Torch device."""
    threads: PositiveInt = 1
    """Torch threads."""
    progress: bool = True
    """Show progress bars."""

    def __post_init__(self) -> None:
        """Read the files of ``bddl_path``; they are the suite from then on."""
        if self.bddl_path:
            self.suites = (str(choose_suite(None, self.bddl_path)),)
        self.bddl_path = None


@dataclass
class VLAStates:
    """N hidden states and their circumstances, episode after episode.

    Attributes:
        hidden: (N, M, H) float16: half the memory; a state's own scale is about 1.
        proprio: (N, 8) float32, as ``LiberoSim.proprio``; the first three are the grip site (m).
        object_pos: (N, 3) float64, position in the world frame (m) of the first thing that the
            task is about; NaN where it is not known (demonstrations in files).
        task: (N,) int64, index into ``tasks``.
        player: (N,) int64, index into :data:`PLAYERS`.
        episode: (N,) int64, a number of its own for every episode.
        tasks: Names, ``"<suite>_<task_id>"``.
    """

    hidden: torch.Tensor
    proprio: np.ndarray
    object_pos: np.ndarray
    task: np.ndarray
    player: np.ndarray
    episode: np.ndarray
    tasks: list[str]

    def __len__(self) -> int:
        """Return N."""
        return len(self.hidden)

    def select(self, rows: np.ndarray) -> VLAStates:
        """Return the rows of a mask (N,)."""
        index = np.flatnonzero(rows)
        names = [f.name for f in dataclasses.fields(self) if f.name != "tasks"]
        return dataclasses.replace(self, **{name: getattr(self, name)[index] for name in names})

    @classmethod
    def of_episode(
        cls,
        hidden: torch.Tensor,
        proprio: np.ndarray,
        object_pos: np.ndarray,
        player: str,
        task: str,
    ) -> VLAStates:
        """Return the states of one episode of a player and a task, both by name."""
        zeros, who = np.zeros(len(hidden), np.int64), PLAYERS.index(player)
        return cls(hidden, proprio, object_pos, zeros, zeros + who, zeros, [task])

    def held_out(self, share: float) -> np.ndarray:
        """Return a mask (N,) of the last ``share`` of every task's and player's episodes.

        Whole episodes, hence whole layouts: a neighbouring frame would give the answer away. Of
        two or more episodes at least one is held out, and one is kept.
        """
        mask = np.zeros(len(self), dtype=bool)
        for group in np.unique(np.stack([self.task, self.player], axis=1), axis=0):
            inside = (self.task == group[0]) & (self.player == group[1])
            episodes = np.unique(self.episode[inside])
            count = held_out_count(len(episodes), share)
            if count:
                mask |= np.isin(self.episode, episodes[-count:])
        return mask


def held_out_count(episodes: int, share: float) -> int:
    """Return how many of a task's and player's episodes are held out."""
    return max(0, min(max(1, round(episodes * share)), episodes - 1))


@torch.no_grad()
def infer_hidden(
    vla: FrozenVLA, images: np.ndarray, instruction: str, proprio: np.ndarray
) -> torch.Tensor:
    """Return the VLA's hidden states (N, M, H) float16 on the CPU, a batch after the other.

    A stateful VLA looks at one frame after the other, with the state that these lead to.
    The images (N, 2, S, S, 3) uint8, agentview then wrist, upright, and the proprioception (N, 8)
    float32 are of one episode, in its order.
    """
    parts, memory = [], VLAMemory(vla)
    size = 1 if memory.is_stateful else BATCH
    for start in range(0, len(images), size):
        rows = slice(start, start + size)
        batch = {n: images[rows, camera] for camera, n in enumerate(CAMERAS) if n in vla.cameras}
        count = len(proprio[rows])
        at = memory.at([0] * count, [start == 0])
        out = at.infer(batch, [instruction] * count, proprio[rows])
        parts.append(kept_hidden(vla, check_output(vla, out, count).hidden))
    return torch.cat(parts)


def kept_hidden(vla: FrozenVLA, hidden: torch.Tensor) -> torch.Tensor:
    """Return a VLA's hidden states as float16 on the CPU.

    Raises:
        ConfigError: If they are no finite numbers in float16.
    """
    hidden = hidden.to("cpu", torch.float16)
    if not hidden.isfinite().all():
        raise ConfigError(
            f"The VLA {vla.name!r} made hidden states that are not finite, or beyond 65,504, "
            "float16's largest number, in which they are kept: let it scale them."
        )
    return hidden
