"""Demonstrations as training batches for behaviour cloning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vla_gym.demos.files import read_episodes, read_instruction, read_meta
from vla_gym.errors import ConfigError
from vla_gym.vla.paraphrases import paraphrases
from vla_gym.vla.preprocess import area_downsample, proprio_features
from vla_gym.vla.tokens import WordTokenizer


@dataclass
class DemoSet:
    """Frames of many episodes of several tasks, one after the other.

    Attributes:
        images: (N, 2, 64, 64, 3) uint8, agentview then wrist.
        proprio: (N, 11) float32 proprioception features.
        actions: (N, 7) float32, the expert's action at each frame.
        episode_end: (N,) int64, index after the last frame of the frame's episode.
        task: (N,) int64, index into ``instructions``.
        instructions: One per task.
        train: (N,) bool, False for frames of held-out episodes.
        asset_packs: Names of the packs that the frames show; empty for files of others.
    """

    images: np.ndarray
    proprio: np.ndarray
    actions: np.ndarray
    episode_end: np.ndarray
    task: np.ndarray
    instructions: list[str]
    train: np.ndarray
    asset_packs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Index the training frames of every task."""
        ids = range(len(self.instructions))
        self._frames = [np.flatnonzero(self.train & (self.task == i)) for i in ids]

    def chunks(self, index: np.ndarray, horizon: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the C = ``horizon`` actions that follow some frames (B,).

        Returns:
            actions (B, C, 7) float32 and valid (B, C) bool, False after the episode's end.
        """
        steps = index[:, None] + np.arange(horizon)
        valid = steps < self.episode_end[index][:, None]
        return self.actions[np.minimum(steps, len(self.actions) - 1)], valid

    def sample(self, rng: np.random.Generator, batch_size: int) -> np.ndarray:
        """Draw training frames (B,): tasks uniformly, then frames uniformly inside the task."""
        draws = rng.random(batch_size)
        tasks = rng.integers(len(self._frames), size=batch_size)
        frames = (self._frames[t] for t in tasks)
        return np.array([f[int(u * len(f))] for f, u in zip(frames, draws, strict=True)])

    def held_out(self, limit: int) -> np.ndarray:
        """Return up to ``limit`` frames (evenly spread) of the held-out episodes."""
        frames = np.flatnonzero(~self.train)
        return frames[:: max(1, -(-len(frames) // limit))]


def load_demos(
    folder: str | Path, demos_per_task: int | None = None, held_out_episodes: int = 2
) -> DemoSet:
    """Read every file of demonstrations below a folder, or one file.

    Files with one instruction (a task in several looks) become one task. ``demos_per_task`` and
    ``held_out_episodes`` count episodes of a file; of these the last ones are held out, never more
    than a fifth.

    Raises:
        ConfigError: If there is no file or one does not have the expected arrays.
    """
    parts: dict[str, list[np.ndarray]] = {
        key: [] for key in ("images", "proprio", "actions", "episode_end", "task", "train")
    }
    instructions: list[str] = []
    packs: set[str] = set()
    offset = 0
    for path in demo_files(folder):
        packs |= read_packs(path)
        # At the size that the embedded VLA works on.
        episodes = [(area_downsample(i), p, a) for i, p, a in read_episodes(path, demos_per_task)]
        if not episodes:
            raise ConfigError(f"{path} holds no demonstrations.")
        if (instruction := read_instruction(path)) not in instructions:
            instructions.append(instruction)
        held = min(held_out_episodes, len(episodes) // 5)
        for number, (images, proprio, actions) in enumerate(episodes):
            count = len(actions)
            offset += count
            parts["images"].append(images)
            parts["proprio"].append(proprio_features(proprio))
            parts["actions"].append(actions)
            parts["episode_end"].append(np.full(count, offset))
            parts["task"].append(np.full(count, instructions.index(instruction)))
            parts["train"].append(np.full(count, number < len(episodes) - held))
    joined = {key: _join(value) for key, value in parts.items()}
    return DemoSet(**joined, instructions=instructions, asset_packs=tuple(sorted(packs)))


def _join(parts: list[np.ndarray]) -> np.ndarray:
    """Join arrays along the first axis; each goes as soon as it is copied, to halve the memory."""
    joined = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    end = len(joined)
    while parts:
        part = parts.pop()
        joined[end - len(part) : end] = part
        end -= len(part)
    return joined


def demo_files(folder: str | Path) -> list[Path]:
    """Return the ``*_demo.hdf5`` below a folder, or the file itself, in a fixed order.

    Raises:
        ConfigError: If there is none.
    """
    folder = Path(folder).expanduser()
    if folder.is_file():
        return [folder]
    files = sorted(folder.rglob("*_demo.hdf5"))
    if not files:
        raise ConfigError(
            f"No *_demo.hdf5 below {folder}: record demonstrations with 'vla-gym demos'."
        )
    return files


def read_packs(path: Path) -> set[str]:
    """Return the asset pack that a file's frames show, if ``vla-gym demos`` wrote it."""
    try:
        return {str(read_meta(path)["pack"])}
    except (ConfigError, KeyError):
        return set()


def random_shift(images: np.ndarray, pixels: int, rng: np.random.Generator) -> np.ndarray:
    """Shift every image (B, K, H, W, C) by up to ``pixels`` in both axes, repeating the border.

    The shifts are drawn one per row and camera; 0 pixels return the input.
    """
    if pixels == 0:
        return images
    height, width = images.shape[2:4]
    border = (pixels, pixels)
    padded = np.pad(images, ((0, 0), (0, 0), border, border, (0, 0)), mode="edge")
    shifts = rng.integers(0, 2 * pixels + 1, size=(*images.shape[:2], 2))
    out = np.empty_like(images)
    for row, camera in np.ndindex(*images.shape[:2]):
        dy, dx = shifts[row, camera]
        out[row, camera] = padded[row, camera, dy : dy + height, dx : dx + width]
    return out


class Sentences:
    """For each task the original instruction and its paraphrases."""

    def __init__(self, instructions: Sequence[str], tokenize: WordTokenizer) -> None:
        """Tokenise everything once; task i has the instruction i."""
        variants = [[text, *paraphrases(text)] for text in instructions]
        flat = tokenize([text for texts in variants for text in texts])
        self._ids = flat  # (all sentences, W), 0 = padding
        self._counts = np.array([len(texts) for texts in variants])
        self._first = np.cumsum(self._counts) - self._counts

    def originals(self, tasks: np.ndarray) -> torch.Tensor:
        """Return the word ids (B, W) of the instructions of tasks (B,)."""
        return self._trim(self._ids[self._first[tasks]])

    def draw(self, tasks: np.ndarray, rate: float, rng: np.random.Generator) -> torch.Tensor:
        """Return a sentence for each task (B,): with probability ``rate`` one of its paraphrases.

        Returns:
            (B, W) int64 word ids, 0 = padding.
        """
        chance, which = rng.random((2, len(tasks)))
        others = self._counts[tasks] - 1
        variant = np.where(chance < rate, np.minimum(1 + which * others, others), 0).astype(int)
        return self._trim(self._ids[self._first[tasks] + variant])

    @staticmethod
    def _trim(ids: torch.Tensor) -> torch.Tensor:
        """Cut the columns that are padding in every row."""
        return ids[:, : max(1, int((ids > 0).sum(1).max()))]
