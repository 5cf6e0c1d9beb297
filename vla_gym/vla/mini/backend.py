"""The embedded VLA as a backend: a policy of a few million parameters that runs anywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from vla_gym.envs.checks import MAX_SEED, as_integer
from vla_gym.errors import ConfigError
from vla_gym.vla.base import ACTION_SIZE, CAMERAS, GRIPPER, ActionOutput, FlowOutput
from vla_gym.vla.files import WEIGHTS_ROOT
from vla_gym.vla.mini.model import MiniVLA, load_model, to_pixel_values
from vla_gym.vla.one_pass import OnePassTokens
from vla_gym.vla.preprocess import (
    IMAGE_SIZE,
    area_downsample,
    check_images,
    check_rows,
    proprio_features,
)
from vla_gym.vla.tokens import WordTokenizer, actions_to_bins, bins_to_actions


class MiniBackend(OnePassTokens):
    """:class:`~vla_gym.vla.base.FrozenVLA` over :class:`MiniVLA`; deterministic and greedy."""

    shipped_as: str | None = None  # its name among the checkpoints of this package

    def __init__(
        self,
        model: MiniVLA,
        name: str = "mini",
        head: str | None = None,
        *,
        seed: int = 0,
        num_steps: int | None = None,
    ) -> None:
        """Freeze a network.

        Args:
            model: The network, on its device.
            name: Name of the checkpoint.
            head: ``"l1"``, ``"token"`` or ``"flow"``: which head ``infer`` takes the actions from;
                None: flow where there is one, else l1.
            seed: Of the noise that the flow starts from, the same for every row and call.
            num_steps: Denoising steps of the flow; None: the checkpoint's.

        Raises:
            ConfigError: If there is no such head, or ``num_steps`` is not positive.
        """
        self.model = model.eval().requires_grad_(False)
        self.heads = ("l1", "token") if model.flow_head is None else ("flow", "l1", "token")
        self.head = head or self.heads[0]
        if self.head not in self.heads:
            heads = " or ".join(map(repr, self.heads))
            raise ConfigError(f"Expected head {heads}, got {head!r:.80}.")
        self.name, config = name, model.config
        self.num_steps = config.flow_steps if num_steps is None else num_steps
        as_integer(self.num_steps, "num_steps", 1, 1000)
        as_integer(seed, "seed", 0, MAX_SEED)
        noise_shape = (config.horizon, ACTION_SIZE)
        self._noise = torch.randn(noise_shape, generator=torch.Generator().manual_seed(seed))
        self.horizon = self.num_hidden_tokens = config.horizon
        self.hidden_size = config.hidden_size
        self.image_size, self.input_size = 128, IMAGE_SIZE
        self.tokenize = WordTokenizer(config.vocabulary, config.max_words)

    @classmethod
    def from_pretrained(
        cls,
        folder: Path,
        *,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        compile: bool = False,
        head: str | None = None,
        seed: int = 0,
        num_steps: int | None = None,
    ) -> MiniBackend:
        """Load a checkpoint folder; see :func:`vla_gym.vla.load` and the class.

        The folder's name becomes the backend's. ``dtype`` is float32 or None: the network is too
        small to gain from another.
        """
        if dtype not in (None, torch.float32):
            raise ConfigError(f"The mini VLA runs in float32, got {dtype}: leave dtype out.")
        folder = Path(folder)
        model = load_model(folder)
        model.to(device)
        if compile:
            model.compile()
        backend = cls(model, folder.name, head, seed=seed, num_steps=num_steps)
        if folder.resolve() == (WEIGHTS_ROOT / folder.name).resolve():
            backend.shipped_as = folder.name
        return backend

    def hidden_states(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> torch.Tensor:
        """Return the states (B, C, H) that all heads read, with gradients where there are any."""
        small = {name: area_downsample(images[name]) for name in CAMERAS if name in images}
        stacked = np.stack(check_images(small, CAMERAS, IMAGE_SIZE), axis=1)
        features = proprio_features(proprio)
        check_rows(len(stacked), instructions, features)
        device = self.model.device
        hidden: torch.Tensor = self.model(
            to_pixel_values(stacked).to(device),
            self.tokenize(instructions).to(device),
            torch.from_numpy(features).to(device),
        )
        return hidden

    def action_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> ActionOutput:
        """Run the network once; see :class:`~vla_gym.vla.base.TrainableActionVLA`."""
        hidden = self.hidden_states(images, instructions, proprio)
        return ActionOutput(hidden, self.model.action_head(hidden))

    def to_env(self, normalized: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (..., 7) of the L1 head's."""
        return _switch_gripper(normalized.clamp(-1.0, 1.0))

    def flow_outputs(
        self, images: dict[str, np.ndarray], instructions: list[str], proprio: np.ndarray
    ) -> FlowOutput:
        """Run the network without the flow; see :class:`~vla_gym.vla.base.TrainableFlowVLA`.

        The hidden states are the action queries', whatever the noise.

        Raises:
            ConfigError: If the checkpoint has no flow head.
        """
        head = self.model.flow_head
        if head is None:
            raise ConfigError(f"The checkpoint {self.name!r} has no flow head; mini-flow has one.")
        hidden = self.hidden_states(images, instructions, proprio)

        def velocity(x: torch.Tensor, time: float) -> tuple[torch.Tensor, torch.Tensor]:
            return hidden, head(hidden, x, x.new_full((len(x),), time))

        start = self._noise.to(hidden.device).expand(len(hidden), -1, -1)
        return FlowOutput(velocity, start)

    def flow_to_env(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (B, C, 7) of the flow head's."""
        config = self.model.config
        mean, std = chunk.new_tensor(config.action_mean), chunk.new_tensor(config.action_std)
        return self.to_env(chunk * std + mean)

    def token_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, C, 7, 256) of states (B, C, H)."""
        return self.model.token_logits(hidden)

    def tokens_to_actions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the environment's actions (..., C, 7) float32 of tokens (..., C, 7)."""
        return _switch_gripper(bins_to_actions(tokens))

    def actions_to_tokens(self, actions: torch.Tensor) -> torch.Tensor:
        """Return the tokens (..., C, 7) int64 of the environment's actions (..., C, 7)."""
        return actions_to_bins(actions)


def _switch_gripper(actions: torch.Tensor) -> torch.Tensor:
    """Make the gripper the switch that it is: -1 (open) or +1 (close)."""
    gripper = torch.where(actions[..., GRIPPER:] > 0, 1.0, -1.0)
    return torch.cat([actions[..., :GRIPPER], gripper], dim=-1)
