"""Options of a flow-matching policy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_gym.errors import ConfigError

NOISES = ("fixed", "zeros", "observation")


@dataclass(frozen=True)
class FlowOptions:
    """Options of both backends.

    Attributes:
        vlm: Folder with tokenizer and, for SmolVLA, config.json of the VLM that the policy was
            made from; None looks into the checkpoint, its subfolder ``vlm`` and
            huggingface_hub's cache.
        noise: ``"fixed"``: one draw for the seed, the same for every row and call, a typical point
            of the distribution that the policy was trained on. ``"zeros"``: the middle of that
            distribution, which no training sample was ever that close to. ``"observation"``: a
            draw for the seed and the row's own images, instruction and proprioception, so that
            rows and steps have noise as different as in the original.
        seed: Of the noise.
        num_steps: Denoising steps; None for the checkpoint's.
        image_size: Side in pixels of the renders; None for that of the training data.
    """

    vlm: str | Path | None = None
    noise: str = "fixed"
    seed: int = 0
    num_steps: int | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        """Raise ConfigError if a value is out of range."""
        if self.noise not in NOISES:
            raise ConfigError(f"Expected noise in {NOISES}, got {self.noise!r}.")
        for name in ("num_steps", "image_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"Expected {name} >= 1, got {value}.")
