"""Options of flow-matching policies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vla_gym.outside import ChunkLength, Count, ImageSide


@dataclass(frozen=True)
class FlowOptions:
    """Options of all three backends.

    Attributes:
        vlm: Folder with tokenizer and, for SmolVLA, config.json of the VLM that the policy was
            made from; None looks into the checkpoint's subfolder ``vlm``, of pi0 and pi0.5
            into the checkpoint too, and into huggingface_hub's cache.
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
    noise: Literal["fixed", "zeros", "observation"] = "fixed"
    seed: Count = 0
    num_steps: ChunkLength | None = None
    image_size: ImageSide | None = None


@dataclass(frozen=True)
class Pi05Options(FlowOptions):
    """Options of pi0.5.

    Attributes:
        state_in_prompt: How many numbers of the state the prompt tells: LIBERO's 8; 32 for a policy
            that was trained with lerobot before 0.5, which padded them; 0 for one that was trained
            with openpi's ``discrete_state_input=False``, as its own LIBERO policy. No file of a
            checkpoint tells which.
    """

    state_in_prompt: Literal[8, 32, 0] = 8
