"""SmolVLA (arXiv 2506.01844) as a backend, from lerobot's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vla_gym.errors import WeightsError
from vla_gym.vla.checkpoint_files import Checkpoint
from vla_gym.vla.files import read_vlm_config
from vla_gym.vla.flow.backend import FlowBackend, FlowInputs, Velocity
from vla_gym.vla.flow.functions import time_embedding
from vla_gym.vla.flow.lerobot_files import LeRobotPolicyFiles
from vla_gym.vla.flow.smolvla_model import SmolVLANetwork
from vla_gym.vla.load_weights import described_by


class SmolVLABackend(FlowBackend):
    """:class:`~vla_gym.vla.base.FrozenVLA` over :class:`SmolVLANetwork`."""

    centred_padding = False
    policy_type = "smolvla"
    steps_key = "num_steps"
    backbone_files = ("config.json", "tokenizer.json")
    float32_parts = ("state_proj", "action_")
    model: SmolVLANetwork

    def set_up(self, compile: bool) -> None:
        """See :meth:`FlowBackend.set_up`."""
        files = self.files
        width, height = files.config.resize_imgs_with_padding or [files.image_size] * 2
        self.pixel_size = int(height), int(width)
        # Functions of the network: a bound method would go on with the original's in a copy.
        self._prefill, self._denoise = SmolVLANetwork.prefill, SmolVLANetwork.denoise
        if compile:
            self._prefill = torch.compile(SmolVLANetwork.prefill, dynamic=False)
            self._denoise = torch.compile(SmolVLANetwork.denoise, dynamic=False)

    @staticmethod
    def make_network(
        files: LeRobotPolicyFiles,
        backbone: Path,
        checkpoint: Checkpoint,  # noqa: ARG004
    ) -> tuple[Any, Callable[[str], str | None]]:
        """See :meth:`FlowBackend.make_network`."""
        policy, vlm_config = files.config, read_vlm_config(backbone, ("smolvlm",))
        if policy.num_expert_layers not in (-1, 0, policy.num_vlm_layers):
            raise WeightsError(
                f"Checkpoint {files.folder} has num_expert_layers {policy.num_expert_layers}: only "
                "as many as num_vlm_layers are implemented."
            )
        with described_by(files.folder), torch.device("meta"):
            return SmolVLANetwork(policy, vlm_config), _rename

    def flow(self, inputs: FlowInputs) -> Velocity:
        """Run the VLM once; see :meth:`FlowBackend.flow`."""
        prefix = self._prefill(self.model, inputs)
        policy = self.files.config

        def velocity(x: torch.Tensor, time: float) -> tuple[torch.Tensor, torch.Tensor]:
            # SmolVLA counts time from the action (0) to noise (1).
            at = time_embedding(
                1.0 - time, self.hidden_size, policy.min_period, policy.max_period, x.device
            )
            hidden, towards_noise = self._denoise(self.model, prefix, x, at)
            return hidden, -towards_noise

        return velocity


def _rename(name: str) -> str | None:
    """Return the network's name of a checkpoint's tensor; None for what is never used."""
    name = name.replace("_orig_mod.", "")  # saved from a compiled policy
    # Statistics in checkpoints from before the processors, and the VLM's unused head.
    if not name.startswith("model.") or ".lm_head." in name:
        return None
    return name.removeprefix("model.")
