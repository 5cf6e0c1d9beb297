"""The embedded VLA as a backend: a policy of a few million parameters that runs anywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from vla_gym.errors import ConfigError
from vla_gym.vla.base import GRIPPER, FrozenVLA, TokenOutput, VLAOutput
from vla_gym.vla.files import verify_checksums
from vla_gym.vla.mini.model import MiniVLA, MiniVLAOutput, load_model, to_pixel_values
from vla_gym.vla.preprocess import IMAGE_SIZE, check_rows, proprio_features, stack_cameras
from vla_gym.vla.tokens import OnePassTokens, WordTokenizer, actions_to_bins, bins_to_actions


class MiniBackend(FrozenVLA, OnePassTokens):
    """:class:`~vla_gym.vla.base.FrozenVLA` over :class:`MiniVLA`; deterministic and greedy."""

    def __init__(self, model: MiniVLA, name: str = "mini", head: str = "l1") -> None:
        """Freeze a network.

        Args:
            model: The network, on its device.
            name: Name of the checkpoint; the RL token is looked up under it.
            head: ``"l1"`` or ``"token"``: which head ``infer`` takes the actions from.

        Raises:
            ConfigError: If ``head`` is something else.
        """
        if head not in ("l1", "token"):
            raise ConfigError(f"Expected head 'l1' or 'token', got {head!r}.")
        self.model = model.eval().requires_grad_(False)
        self.name = name
        self.head = head
        self.horizon = model.config.horizon
        self.num_hidden_tokens = model.config.horizon
        self.hidden_size = model.config.hidden_size
        self.image_size = 128
        self.input_size = IMAGE_SIZE
        self.tokenize = WordTokenizer(model.config.vocabulary, model.config.max_words)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        compile: bool = False,
        head: str = "l1",
    ) -> MiniBackend:
        """Load a checkpoint folder; its name becomes the backend's.

        Args:
            folder: With config.json, model.safetensors and, if it was released, SHA256SUMS.
            device: Torch device.
            dtype: float32 or None; the network is too small to gain from another.
            compile: Whether to compile the network.
            head: See the class.

        Raises:
            ConfigError: If ``dtype`` is another or ``head`` is unknown.
            WeightsError: If the files are corrupt or do not fit the architecture.
        """
        if dtype not in (None, torch.float32):
            raise ConfigError(f"The mini VLA runs in float32, got {dtype}: leave dtype out.")
        folder = Path(folder)
        verify_checksums(folder)
        model = load_model(folder)
        nn.Module.to(model, device)  # PreTrainedModel.to is typed for other arguments
        if compile:
            model.compile()
        return cls(model, folder.name, head)

    def forward(
        self,
        images: dict[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        with_tokens: bool = False,
    ) -> MiniVLAOutput:
        """Preprocess and run the network, with gradients where its parameters have them.

        Arguments as for :meth:`infer`; ``with_tokens`` also computes ``token_logits``.

        Raises:
            ConfigError: If shapes, dtypes or batch sizes do not fit.
        """
        stacked = stack_cameras(images)
        features = proprio_features(proprio)
        check_rows(len(stacked), instructions, features)
        device = self.model.device
        output: MiniVLAOutput = self.model(
            to_pixel_values(stacked).to(device),
            self.tokenize(instructions).to(device),
            torch.from_numpy(features).to(device),
            with_tokens=with_tokens,
        )
        return output

    @torch.no_grad()
    def infer(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> VLAOutput:
        """Predict one chunk per row; see :class:`~vla_gym.vla.base.FrozenVLA`.

        Raises:
            ConfigError: If shapes, dtypes or batch sizes do not fit.
        """
        out = self.forward(images, instructions, proprio, with_tokens=self.head == "token")
        assert out.hidden is not None and out.actions is not None
        if self.head == "token":
            assert out.token_logits is not None
            return VLAOutput(out.hidden, self.tokens_to_actions(out.token_logits.argmax(-1)))
        return VLAOutput(out.hidden, _switch_gripper(out.actions.clamp(-1.0, 1.0)))

    def token_logits(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> torch.Tensor:
        """Return the token head's logits, (B, C, 7, 256), with gradients if the model has them."""
        return self.token_outputs(images, instructions, proprio).logits

    def token_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> TokenOutput:
        """Run the network once; see :class:`~vla_gym.vla.base.TrainableTokenVLA`."""
        out = self.forward(images, instructions, proprio, with_tokens=True)
        assert out.hidden is not None and out.token_logits is not None
        return TokenOutput(out.hidden, out.token_logits)

    def tokens_to_actions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (..., C, 7) float32 of tokens (..., C, 7)."""
        return _switch_gripper(bins_to_actions(tokens))

    def actions_to_tokens(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the tokens (..., C, 7) int64 of the environment's actions (..., C, 7)."""
        return actions_to_bins(actions)


def _switch_gripper(actions: torch.Tensor) -> torch.Tensor:
    """Make the gripper the switch that it is: -1 (open) or +1 (close)."""
    actions[..., GRIPPER] = torch.where(actions[..., GRIPPER] > 0, 1.0, -1.0)
    return actions
