"""What a frozen VLA makes of a batch of camera images: shared by both FrozenVLAObservation."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from vla_gym.envs.checks import as_integer, check_flag
from vla_gym.errors import ConfigError
from vla_gym.vla.base import CAMERAS, FrozenVLA, check_output
from vla_gym.vla.stateful import VLAMemory
from vla_gym.wrappers.vla_inputs import VLAInputs

if TYPE_CHECKING:
    from vla_gym.rl_token import RLTokenEncoder


class VLAFeatures:
    """A frozen VLA and its RL-token encoder as one function of a batch of observations.

    Attributes:
        memory: The model, with its state in every environment if it is stateful.
        views: Cameras that it sees.
        rl_token: The encoder, or None: then the mean hidden state takes the token's place.
        kept: Keys of the observation that are passed on as they are: all but the cameras' images,
            with ``keep_images`` those of the views too.
        space: Observation space of one environment, see ``FrozenVLAObservation``.
        chunk_len: Rows C of the chunks.
        inputs: Packs what the VLA sees; None if it is not kept.
        version: Of the VLA and the encoder, for who trains them; 0 is what was loaded.
        seconds: Time spent in :meth:`__call__` so far.
    """

    def __init__(
        self,
        vla: str | Path | FrozenVLA,
        rl_token: str | RLTokenEncoder | None,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        keep_images: bool = False,
        chunk_len: int | None = None,
        keep_inputs: bool = False,
    ) -> None:
        """Load what is named and check that it fits the spaces of one environment.

        The arguments are those of ``wrappers.vector.FrozenVLAObservation``.

        Raises:
            ConfigError: If it is no VLA, the spaces or the encoder do not fit it, or a stateful one
                would look several times in a chunk.
        """
        from vla_gym.rl_token import choose_rl_token
        from vla_gym.vla import as_vla

        check_flag(keep_images, "keep_images")
        check_flag(keep_inputs, "keep_inputs")
        self.memory = VLAMemory(as_vla(vla))
        self.views = self.vla.cameras
        self.rl_token = choose_rl_token(rl_token, self.vla)
        self.seconds, self.version = 0.0, 0
        self.inputs: VLAInputs | None = None
        self._check_fit(observation_space, action_space)
        assert isinstance(observation_space, spaces.Dict) and action_space.shape is not None
        executed = action_space.shape[0]
        what = "chunk_len (from what is executed to the VLA's horizon)"
        rows = executed if chunk_len is None else chunk_len
        self.chunk_len = as_integer(rows, what, executed, self.vla.horizon)
        if self.memory.is_stateful and self.chunk_len != executed:
            raise ConfigError(
                f"The state of the VLA {self.vla.name!r} goes on once a chunk wherever its chunks "
                f"are played, here once every {executed} of {self.chunk_len} control steps: leave "
                "out the stride."
            )
        left_out = {*CAMERAS, *self.views, "rl_token", "vla_action"}
        left_out -= set(self.views if keep_images else ())
        self.kept = tuple(key for key in observation_space if key not in left_out)
        dim = self.vla.hidden_size if self.rl_token is None else self.rl_token.dim
        self.space = spaces.Dict(
            {
                "rl_token": spaces.Box(-np.inf, np.inf, (dim,), np.float32),
                "vla_action": spaces.Box(
                    -1.0, 1.0, (self.chunk_len, *action_space.shape[1:]), np.float32
                ),
                **{key: observation_space[key] for key in self.kept},
            }
        )
        if keep_inputs:
            shapes = {view: observation_space[view].shape or () for view in self.views}
            self.inputs = VLAInputs(self.vla, shapes)
            self.space["vla_input"] = spaces.Box(0, 255, (self.inputs.size,), np.uint8)
            self.space["vla_version"] = spaces.Box(0.0, np.inf, (1,), np.float32)

    @property
    def vla(self) -> FrozenVLA:
        """The model; who trains it puts the trained one here."""
        return self.memory.vla

    @vla.setter
    def vla(self, vla: FrozenVLA) -> None:
        self.memory = VLAMemory(vla)

    def _check_fit(self, observation_space: gym.Space[Any], action_space: gym.Space[Any]) -> None:
        vla, shape = self.vla, action_space.shape
        if not isinstance(observation_space, spaces.Dict):
            raise ConfigError(
                "The VLA looks at images, so it needs an environment that observes a Dict; got "
                f"{observation_space}. env_wrappers come before the VLA: leave out the one that "
                "flattens. For one vector in place of a Dict make the environment with flat=True."
            )
        found = observation_space.spaces
        proprio = found["proprio"].shape if "proprio" in found else None
        if (
            not set(self.views) <= set(found)
            or proprio != (vla.proprio_size,)
            or not shape
            or (shape[-1] != vla.action_size)
        ):
            raise ConfigError(
                f"The VLA {vla.name!r} was trained with cameras {', '.join(self.views)}, "
                f"{vla.proprio_size} numbers of proprioception and actions of {vla.action_size} "
                f"numbers; this environment has observations {', '.join(found)}, proprioception "
                f"{proprio} and actions {shape}. Make the environment with cameras={self.views}, "
                "or use a VLA for this suite."
            )
        if len(shape) != 2 or shape[0] > vla.horizon:
            raise ConfigError(
                f"Expected actions of shape (C, {vla.action_size}) with C <= {vla.horizon} (the "
                f"VLA's horizon), got {shape}: set chunk_len, or wrap with ActionChunk."
            )
        if self.rl_token is not None and self.rl_token.hidden_size != self.vla.hidden_size:
            raise ConfigError(
                f"The RL-token encoder expects hidden states of size {self.rl_token.hidden_size}, "
                f"the VLA {self.vla.name!r} gives {self.vla.hidden_size}: pretrain one for it with "
                "'vla-gym-train rl-token'."
            )

    def __call__(
        self,
        views: Mapping[str, np.ndarray],
        instructions: list[str],
        proprio: np.ndarray,
        env_ids: Sequence[int] | np.ndarray,
        begins: Sequence[bool] | np.ndarray,
        ended: Sequence[int] | np.ndarray = (),
    ) -> dict[str, np.ndarray]:
        """Run one batched forward pass.

        Args:
            views: Keys ``agentview`` and ``wrist``, each (B, H, W, 3) uint8, upright.
            instructions: B instructions.
            proprio: (B, 8) float32.
            env_ids: Environments of the first rows, see :meth:`VLAMemory.at`.
            begins: Whether these are the first of their episodes.
            ended: Environments of the other rows, which are the last of theirs.

        Returns:
            ``rl_token`` (B, D) float32 and ``vla_action`` (B, C, 7) float32 in [-1, 1]; if inputs
            are kept, ``vla_input`` (B, L) uint8 and ``vla_version`` (B, 1) float32. New arrays.
        """
        began = time.perf_counter()
        vla = self.memory.at(env_ids, begins, ended)
        token, chunk = look(vla, self.rl_token, self.chunk_len, views, instructions, proprio)
        self.seconds += time.perf_counter() - began
        made = {"rl_token": token, "vla_action": chunk}
        if self.inputs is not None:
            made["vla_input"] = self.inputs.pack(views, instructions)
            made["vla_version"] = np.full((len(token), 1), self.version, np.float32)
        return made


def look(
    vla: FrozenVLA,
    rl_token: RLTokenEncoder | None,
    chunk_len: int,
    views: Mapping[str, np.ndarray],
    instructions: list[str],
    proprio: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Run one batched forward pass; observations as in :meth:`VLAFeatures.__call__`.

    A stateful model is given as :meth:`VLAMemory.at` returns it; the encoder may be on any device,
    None is for the mean hidden state; chunk_len C is at most the horizon.

    Returns:
        RL tokens (B, D) float32 and chunks (B, C, 7) float32 in [-1, 1]; new arrays.
    """
    output = check_output(vla, vla.infer(dict(views), instructions, proprio), len(instructions))
    if rl_token is None:
        token = output.hidden.mean(dim=1)
    else:
        # The encoder may be on another device than the VLA.
        weight = next(rl_token.parameters())
        token = rl_token.encode(output.hidden.to(weight.device))
    actions = output.actions[:, :chunk_len].detach().float().cpu().numpy()
    return token.detach().float().cpu().numpy(), np.clip(actions, -1.0, 1.0)
