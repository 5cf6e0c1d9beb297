"""What every frozen VLA backend offers to the environment and the trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    import torch


class VLAOutput(NamedTuple):
    """Result of one batched forward pass.

    Attributes:
        hidden: (B, M, H) float32: last hidden states of the M action tokens.
        actions: (B, C, 7) float32 in the environment's units, [-1, 1]: translation, rotation,
            gripper (-1 opens, +1 closes).
    """

    hidden: torch.Tensor
    actions: torch.Tensor


@runtime_checkable
class FrozenVLA(Protocol):
    """A vision-language-action policy whose weights do not change.

    A backend owns its image orientation, preprocessing, prompt, normalisation and gripper
    convention: callers pass upright renders and get environment actions. Row i of a batch must
    not depend on the other rows.
    """

    @property
    def name(self) -> str:
        """Name under which :func:`vla_gym.rl_token.load_rl_token` finds the RL token."""

    @property
    def horizon(self) -> int:
        """Number C of actions in a chunk."""

    @property
    def num_hidden_tokens(self) -> int:
        """Number M of hidden states per observation."""

    @property
    def hidden_size(self) -> int:
        """Size H of a hidden state."""

    @property
    def image_size(self) -> int:
        """Height and width in pixels of the renders that the backend expects."""

    def infer(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> VLAOutput:
        """Predict one action chunk per row.

        Args:
            images: Keys ``agentview`` and ``wrist``, each (B, H, W, 3) uint8, upright.
            instructions: B instructions in plain language.
            proprio: (B, 8) float32: end-effector position (m), axis-angle (rad), finger joints
                (m).
        """
        ...
