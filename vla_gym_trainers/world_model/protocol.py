"""What a world model offers to wrappers and trainers, and where one is loaded from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from vla_gym.errors import WeightsError

if TYPE_CHECKING:
    from gymnasium import spaces
    from torch import Tensor

    from vla_gym.vla.base import FrozenVLA


#: The observation that a model's memory is, of :class:`.wrapper.WorldModelObservation`.
WORLD_MEMORY = "world_memory"


@runtime_checkable
class WorldModel(Protocol):
    """A recurrent memory and a prediction of the next wrist frame, one step a chunk of C actions.

    ``s_t = update(s_{t-1}, features_t, proprio_t, a_{t-1})``, with ``initial_state`` and ``a = 0``
    at an episode's first frame; ``logits(s_t, tokens_t, a_t)`` are those of tokens_{t+1}.
    Row i of a result must depend on row i of the arguments alone.

    Attributes:
        state_size: Size S of a state.
        chunk_len: Control steps C of a step.
        action_size: Numbers A of an action.
        proprio_size: Numbers of the proprioception.
        num_tokens: Tokens P of a frame.
        codebook_size: How many different tokens K there are.
        cameras: Names of the views that :meth:`features` needs.
        image_size: Height and width in pixels of the renders that it expects.
    """

    state_size: int
    chunk_len: int
    action_size: int
    proprio_size: int
    num_tokens: int
    codebook_size: int
    cameras: tuple[str, ...]
    image_size: int

    def features(
        self, views: Mapping[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> Tensor:
        """Return what is kept of an observation beside its tokens, (B, F) float32.

        Args:
            views: One entry a camera, (B, H, W, 3) uint8, upright.
            instructions: B instructions.
            proprio: (B, proprio size) float32.
        """

    def tokens(self, frames: np.ndarray) -> Tensor:
        """Return the tokens (B, P) int64 of frames (B, H, W, 3) uint8 of the wrist camera."""

    def decode(self, tokens: Tensor) -> np.ndarray:
        """Return the frames (B, S, S, 3) uint8 of tokens (B, P) int64.

        Probabilities (B, P, K) float32 in their place stand for the expected frame.
        """

    def initial_state(self, n: int) -> Tensor:
        """Return the states (n, S) float32 before an episode's first frame."""

    def update(
        self, state: Tensor, features: Tensor, proprio: Tensor, last_action: Tensor
    ) -> Tensor:
        """Return the states (B, S) after one more observation.

        Args:
            state: (B, S) of the step before.
            features: (B, F) of the observation.
            proprio: (B, proprio size) of it.
            last_action: (B, C * A) float32, the chunk that led to it: 0 for control steps that were
                not executed, and at an episode's first frame.
        """

    def logits(self, state: Tensor, tokens: Tensor, action: Tensor) -> Tensor:
        """Return logits (B, P, K) of the next frame's tokens.

        Args:
            state: (B, S) after the present observation.
            tokens: (B, P) of the present frame.
            action: (B, C * A) the chunk that is executed now, as ``last_action``.
        """


def world_memory_size(observation_space: spaces.Dict) -> int:
    """Return the size S of the world model's memory in an observation; 0 if there is none."""
    if WORLD_MEMORY not in observation_space.keys():
        return 0
    (size,) = observation_space[WORLD_MEMORY].shape or ()
    return int(size)


def load_world_model(
    spec: str | Path,
    device: str = "cpu",
    *,
    allow_class: bool = True,
    vlas: Mapping[str, FrozenVLA] | None = None,
) -> WorldModel:
    """Load a world model, frozen.

    Args:
        spec: A run of ``vla-gym-train world-model``, its ``model/`` folder, or
            ``"class:package.module:Class:/path"`` for a class of the caller's own with a
            classmethod ``from_pretrained(path, device=...)``.
        device: Torch device.
        allow_class: False where ``spec`` was read from a file: no class is imported by its path.
        vlas: By name what is loaded already: of a run, the VLA that the model takes its features
            from is looked for here first.

    Raises:
        ConfigError: If a class is named where that is not allowed, or cannot be imported.
        WeightsError: If the files are missing, damaged or another model's.
    """
    from vla_gym.vla.registry import backend_class, parse_spec
    from vla_gym_trainers.world_model.model import GRUWorldModel

    if not str(spec).startswith("class:"):
        found = GRUWorldModel.from_pretrained(model_folder(spec), device=device)
        if vlas and found.sizes.vla in vlas:
            found.use_vla(vlas[found.sizes.vla])
        return found
    parsed = parse_spec(spec, allow_class=allow_class)
    model: Any = backend_class(parsed.backend).from_pretrained(
        parsed.path, device=device, **dict(parsed.options)
    )
    if not isinstance(model, WorldModel):
        raise WeightsError(
            f"{spec} is no world model: {type(model).__name__} lacks members of the protocol "
            "vla_gym_trainers.world_model.protocol.WorldModel."
        )
    return model


def model_folder(path: str | Path) -> Path:
    """Return where a model is: the folder itself, or the ``model/`` of a run.

    Raises:
        WeightsError: If it is a run without a world model.
    """
    folder = Path(path).expanduser()
    if not (folder / "checkpoints").is_dir():
        return folder
    if not (folder / "model").is_dir():
        raise WeightsError(
            f"{folder} is a run without model/: expected one of 'vla-gym-train world-model' (F1's "
            "phase 1) that has trained its tokenizer."
        )
    return folder / "model"
