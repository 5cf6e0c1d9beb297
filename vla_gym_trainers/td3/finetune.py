"""Fine-tuning the VLA through the RL token: VLA -> encoder -> actor, with gradients all the way.

With the trained VLA's hidden states h and chunk c, token z = enc(h), x = (z, proprio), and the
actor's chunk a = mu(x, c), the loss of a batch is

    L = - mean_b [Q(sg(x_b), a_b) / max(mean |Q|, q_min)] + beta mean_b |a_b - a~_b|^2
        + anchor_weight * A

(sg: no gradient). It is the actor's loss of RL Token (arXiv 2604.23073) with gradients beyond the
actor, and the anchor A, which is that paper's reconstruction:

- The critics are frozen and see the state without gradient: a deterministic policy gradient moves
  actions, and a VLA that could move what the critics look at would learn to please them.
- a~ is the chunk of the VLA as it was loaded, c that of the trained one: in these steps beta holds
  the policy to where it began. In the actor's own steps between them it holds the actor to c, as
  it is stored: the leash moves with the VLA, and these steps pull the VLA's end of it back.
  Gradients reach c's head and, by h, all before it.
- A is the mean squared error with which the frozen decoder rebuilds the frozen VLA's standardised
  hidden states from z alone; without a stored decoder |z - z0|^2 / D, z0 the frozen token. It keeps
  the token what the critics and the normaliser were fitted to.

The VLA that collects is the trained one at once. What it made of stored observations is older:
every observation carries the version that looked at it, and stale ones are shown to it again.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vla_gym.errors import ConfigError
from vla_gym.rl_token import stored_decoder
from vla_gym.vla.base import TrainableActionVLA
from vla_gym.vla.lora import LoraSettings
from vla_gym.wrappers.vector import FrozenVLAObservation
from vla_gym.wrappers.vla_features import look
from vla_gym_trainers.networks import reference_chunk
from vla_gym_trainers.on_policy.student import (
    check_can_be_kept,
    check_float32,
    check_trainable,
    checkpoint_layers,
    save_student,
    trainable_copy,
)
from vla_gym_trainers.td3 import losses
from vla_gym_trainers.td3.algorithm_config import TD3Config
from vla_gym_trainers.td3.policy import RLTokenPolicy
from vla_gym_trainers.td3.replay import ChunkReplayBuffer
from vla_gym_trainers.td3.ring import ChunkReplaySamples
from vla_gym_trainers.td3.stale import Side, renew
from vla_gym_trainers.td3.updates import actor_values, kept_references, polyak, tasks_of

#: Heads of the package's backends that the loss does not reach: no adapters for them.
NOT_REACHED = ("token_head", "flow_head", "lm_head")
MAX_GRAD_NORM = 1.0


class VLAFineTuner:
    """Owns the trained copies of VLA and encoder, and puts them where observations are made.

    Attributes:
        vla: The trained copy; what stays frozen of it is shared with the original.
        encoder: The trained copy of the RL token's encoder; None for the mean hidden state.
        adapters: The VLA's LoRA adapters, or None.
        version: Gradient steps of the VLA so far.
    """

    def __init__(self, env: Any, config: TD3Config) -> None:
        """Copy what a ``FrozenVLAObservation`` that keeps its inputs looks through.

        Raises:
            ConfigError: If the environments do not keep what the VLA sees, or the VLA cannot be
                trained by the actions that it regresses.
        """
        features = env.features if isinstance(env, FrozenVLAObservation) else None
        if features is None or features.inputs is None:
            raise ConfigError(
                "vla_update_freq needs environments that keep what the VLA sees: make them by "
                f"LiberoVLA-* with keep_inputs=True, got {env}."
            )
        # What the environments began with; another fine-tuner may have put its own copy there.
        vla = env.vla
        check_trainable(vla, TrainableActionVLA, "through the RL token")
        if vla.head != "l1":
            raise ConfigError(
                "Expected a VLA that acts with its l1 head, through which it is trained, got "
                f"head {vla.head!r} of {vla.name!r}, which has the heads "
                f"{', '.join(vla.heads)}: load it with ?head=l1, or take another VLA."
            )
        check_can_be_kept(env.vla, config.vla_trainable)
        self.config, self.features, self.inputs = config, features, features.inputs
        self._frozen = cast(TrainableActionVLA, env.vla)
        self._frozen_encoder = env.rl_token
        found = {name.rpartition(".")[2] for name, _ in self._frozen.model.named_modules()}
        untrained = tuple(name for name in NOT_REACHED if name in found)
        self.vla, self.adapters = trainable_copy(
            self._frozen,
            config.vla_trainable,
            lora=LoraSettings(config.lora_r, config.lora_alpha, exclude=untrained),
            heads=(),
        )
        check_float32(self._vla_parameters().values())
        if config.gradient_checkpointing:
            checkpoint_layers(self.vla)
        groups = [{"params": list(self._vla_parameters().values()), "lr": config.vla_learning_rate}]
        self.encoder = copy.deepcopy(self._frozen_encoder)
        self._decoder = None
        if self.encoder is not None:
            encoder = list(self.encoder.requires_grad_(True).parameters())
            groups.append({"params": encoder, "lr": config.encoder_learning_rate})
            self._decoder = stored_decoder(self.encoder)
            if self._decoder is not None:
                self._decoder.to(encoder[0].device)
        self.optimizer = torch.optim.Adam(groups)
        self.version = 0
        features.vla, features.rl_token = self.vla, self.encoder

    def _vla_parameters(self) -> dict[str, nn.Parameter]:
        named = self.vla.model.named_parameters()
        return {name: p for name, p in named if p.requires_grad}

    def step(
        self, policy: RLTokenPolicy, buffer: ChunkReplayBuffer, rng: torch.Generator
    ) -> dict[str, float]:
        """Do one gradient step of VLA, encoder and actor; the actor's target follows.

        The gradient is that of the whole batch, which is drawn from the buffer, added up over
        micro-batches. The generator draws the reference dropout.

        Returns:
            Metrics, see ``train/vla_*`` in docs/metrics.md.
        """
        config = self.config
        index = buffer.draw(config.vla_batch_size)
        self.refresh(buffer, index, ("obs",))
        observations, seen = buffer.rows(index).observations, buffer.vla_inputs(index)
        keep = kept_references(len(index), config, rng)
        divisor = self._divisor(policy, observations, keep)
        self.optimizer.zero_grad(set_to_none=True)
        policy.actor_optimizer.zero_grad(set_to_none=True)
        totals: defaultdict[str, float] = defaultdict(float)
        policy.critic.requires_grad_(False)
        for rows in torch.arange(len(index)).split(config.vla_micro_batch_size):
            part = {key: value[rows] for key, value in observations.items()}
            loss, parts = self._loss(policy, part, seen[rows], keep[rows], divisor[rows])
            share = len(rows) / len(index)
            (share * loss).backward()
            for name, value in parts.items():
                totals[name] += share * float(value)
        policy.critic.requires_grad_(True)
        mine = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(mine, MAX_GRAD_NORM)
        if norm.isfinite():  # else the step is left out
            self.optimizer.step()
            policy.actor_optimizer.step()
            polyak(policy.actor, policy.actor_target, config.tau * config.policy_delay)
            self._set_version(self.version + 1)
        self.optimizer.zero_grad(set_to_none=True)  # they are as large as what is trained
        totals["vla_reference_rms"] = totals["vla_reference_rms"] ** 0.5
        return {**totals, "vla_grad_norm": float(norm)}

    @torch.no_grad()
    def _divisor(
        self, policy: RLTokenPolicy, observations: dict[str, Tensor], keep: Tensor
    ) -> Tensor:
        """Return the divisor of -Q of the whole batch, from what is stored."""
        x, reference = policy.normalizer(observations), reference_chunk(observations)
        action = policy.actor(x, reference, keep)
        q, _ = actor_values(policy, x, action, reference, self.config)
        return losses.q_divisor(q, tasks_of(observations))

    def _loss(
        self,
        policy: RLTokenPolicy,
        observations: dict[str, Tensor],
        seen: np.ndarray,
        keep: Tensor,
        divisor: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch and its parts; see the module."""
        views, texts = self.inputs.unpack(seen)
        proprio = observations["proprio"].cpu().numpy()
        hidden, chunk = self.vla.action_outputs(views, texts, proprio)
        with torch.no_grad():
            frozen_hidden, frozen_chunk = self._frozen.action_outputs(views, texts, proprio)
            near = self._to_chunk(frozen_chunk, policy.device)
        token, anchor = self._token_and_anchor(hidden, frozen_hidden)
        mine = {**observations, "rl_token": token.to(policy.device)}
        x, reference = policy.normalizer(mine), self._to_chunk(chunk, policy.device)
        action = policy.actor(x, reference, keep)
        q, values = actor_values(policy, x.detach(), action, reference, self.config)
        loss, distance = losses.actor_loss(
            q, action, near, policy.chunk_scale, self.config.bc_weight, divisor
        )
        loss = loss + self.config.anchor_weight * anchor.to(policy.device)
        return loss, {
            "vla_loss": loss.detach(),
            "vla_q": values.detach().mean(),
            "vla_reference_rms": distance / action.shape[1],
            "vla_anchor": anchor.detach(),
        }

    def _to_chunk(self, actions: Tensor, device: torch.device) -> Tensor:
        """Return chunks (B, A) in [-1, 1] of what the action head gives, (B, horizon, N)."""
        chunk: Tensor = self.vla.to_env(actions)[:, : self.features.chunk_len]
        return chunk.float().clamp(-1.0, 1.0).flatten(1).to(device)

    def _token_and_anchor(self, hidden: Tensor, frozen_hidden: Tensor) -> tuple[Tensor, Tensor]:
        if self.encoder is None or self._frozen_encoder is None:
            token = hidden.mean(dim=1)
            return token, (token - frozen_hidden.mean(dim=1)).square().mean()
        device = next(self.encoder.parameters()).device
        hidden, frozen_hidden = hidden.to(device), frozen_hidden.to(device)
        token = self.encoder(hidden)
        if self._decoder is None:
            return token, (token - self._frozen_encoder.encode(frozen_hidden)).square().mean()
        states = self._frozen_encoder.standardise(frozen_hidden)
        alone = torch.ones(len(token), dtype=torch.bool, device=device)  # no state before, as hint
        return token, F.mse_loss(self._decoder(token, states, alone), states)

    def _set_version(self, version: int) -> None:
        self.version = self.features.version = version

    def refresh(
        self,
        buffer: ChunkReplayBuffer,
        index: np.ndarray,
        prefixes: tuple[Side, ...] = ("obs", "next"),
    ) -> int:
        """Show the VLA again what is stale in some slots; see :func:`.stale.renew`."""
        oldest, size = self.version - self.config.max_token_staleness, self.config.vla_batch_size
        return renew(buffer, index, prefixes, oldest, self._look, size)

    def sample(self, buffer: ChunkReplayBuffer, size: int) -> tuple[ChunkReplaySamples, float]:
        """Return a batch in which nothing is stale, and the share of it that was."""
        index = buffer.draw(size)
        stale = self.refresh(buffer, index)
        return buffer.rows(index), stale / (2 * len(np.unique(index)))

    def refresh_observation(self, observation: dict[str, np.ndarray]) -> None:
        """Renew, in place, what is acted on next; every row was made by an earlier version."""
        made = self._look(observation["vla_input"], observation["proprio"])
        for key, values in made.items():
            observation[key][...] = values

    def _look(self, seen: np.ndarray, proprio: np.ndarray) -> dict[str, Any]:
        views, texts = self.inputs.unpack(seen)
        parts = (self.vla, self.encoder, self.features.chunk_len)
        token, chunk = look(*parts, views, texts, np.asarray(proprio, np.float32))
        return {"rl_token": token, "vla_action": chunk, "vla_version": self.version}

    def state_dict(self, optimizer: bool = True) -> dict[str, Any]:
        """Return copies of all that is trained and the version, with or without Adam's moments."""
        trained = {name: p.detach().clone() for name, p in self._vla_parameters().items()}
        encoder = None if self.encoder is None else copy.deepcopy(self.encoder.state_dict())
        state = {"vla": trained, "encoder": encoder, "version": self.version}
        return state | (
            {"optimizer": copy.deepcopy(self.optimizer.state_dict())} if optimizer else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` returned.

        Raises:
            ConfigError: If it is of another VLA or of other adapters.
        """
        mine = self._vla_parameters()
        sizes = {name: p.shape for name, p in mine.items()}
        if sizes != {name: value.shape for name, value in state["vla"].items()}:
            raise ConfigError(
                f"The saved parameters do not fit {type(self.vla.model).__name__}: go on with the "
                "VLA, vla_trainable and lora_r that the run began with."
            )
        with torch.no_grad():
            for name, p in mine.items():
                p.copy_(state["vla"][name])
        if self.encoder is not None:
            self.encoder.load_state_dict(state["encoder"])
        if "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        self._set_version(state["version"])

    def save(self, folder: Path) -> None:
        """Write ``vla/`` or ``adapters/``, and ``rl_token/``, as ``vla-gym eval`` takes them."""
        save_student(self.vla, self.adapters, folder)
        if self.encoder is not None:
            self.encoder.save_pretrained(folder / "rl_token", self._decoder, half=False)
