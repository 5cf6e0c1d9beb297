"""From a rollout with advantages to changed parameters."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.config import OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.objective import (
    LOSSES,
    SUMS,
    Counts,
    gather,
    loss_metrics,
    micro_batches,
    objective,
    per_factor,
    split,
)
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.policy import Policy
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.value_fit import ValueMemory, fit_values

_NORM_HISTORY, _NORM_MINIMUM = 50, 5
_RL = Phase()


class Learner:
    """Optimises a policy on rollouts; see :meth:`update`.

    Attributes:
        policy: Changed in place.
        optimizer: Adam over what of the policy is trained.
        skipped: Updates skipped so far because of their gradient's norm.
        updates: Updates done so far.
    """

    def __init__(
        self,
        policy: Policy,
        config: OnPolicyConfig,
        *,
        reference: Policy | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        """Make a learner; all processes take over the parameters of process 0.

        Args:
            policy: What is trained; with a value head, the configuration is PPO's.
            config: Numbers of the optimisation, and the seed of the order of chunks.
            reference: Of the KL penalty; needed if ``kl_coef`` is positive.
            group: The processes that learn together.

        Raises:
            ConfigError: If nothing is trainable, or the reference is missing.
        """
        if config.kl_coef > 0.0 and reference is None:
            raise ConfigError("kl_coef > 0 needs a reference policy.")
        named = policy.named_parameters()
        value_of = {name: name.startswith("value_head.") for name in named}
        if all(value_of.values()):
            raise ConfigError("Nothing of the policy is trained: see trainable_copy().")
        self.policy, self.config, self.reference = policy, config, reference
        self.group = group or ProcessGroup()
        self.parameters = list(named.values())
        self.group.broadcast(self.parameters)
        own = [p for name, p in named.items() if not value_of[name]]
        groups = [{"params": own, "lr": config.learning_rate}]
        self.memory: ValueMemory | None = None
        if isinstance(config, PPOConfig) and policy.needs_values:
            values = [p for name, p in named.items() if value_of[name]]
            groups.append({"params": values, "lr": config.value_learning_rate})
            if config.value_epochs:
                self.memory = ValueMemory(config.value_replay)
        # PPO's usual eps: with 1e-8 a gradient that is rounding alone would move a full step.
        self.optimizer = torch.optim.Adam(groups, eps=1e-5)
        self.skipped = self.updates = 0
        self._norms: deque[float] = deque(maxlen=_NORM_HISTORY)
        self._rng = np.random.default_rng(config.seed)

    def update(
        self,
        rollout: Rollout,
        advantages: Tensor,
        keep: Tensor,
        returns: Tensor | None = None,
        phase: Phase = _RL,
    ) -> dict[str, float]:
        """Learn from a rollout.

        Args:
            rollout: What was played.
            advantages: [rows, chunks].
            keep: [rows, chunks] bool: chunks of the surrogate loss. Those of a teacher are left
                out of it.
            returns: [rows, chunks], of the value head.
            phase: What takes part.

        Returns:
            Metrics, over the minibatches of this call; see docs/on_policy.md.
        """
        config, rate = self.config, phase.learning_rate
        self.optimizer.param_groups[0]["lr"] = config.learning_rate if rate is None else rate
        if self.policy.value_head is None:
            returns = None
        held = config.kl_coef > 0.0
        batch = gather(self.policy, rollout, advantages, keep, returns, phase, held=held)
        if held:
            batch["reference"] = self.refer(rollout, batch)
        totals = dict.fromkeys((*SUMS, *Counts._fields), 0.0)
        norms: list[float] = []
        stopped, skipped, updates = False, self.skipped, self.updates
        for _ in range(phase.epochs or config.epochs):
            minibatches = phase.num_minibatches or config.num_minibatches
            for part in split(len(batch), minibatches, self.group, self._rng):
                chunks = batch[torch.from_numpy(part)]
                sums, counts = self.gradient(rollout, chunks, phase)
                if not any(counts):
                    continue
                known = {**counts._asdict(), **sums}
                for key, value in known.items():
                    totals[key] += value * known.get(LOSSES.get(key, ""), 1.0)
                kl = sums["kl"] / max(counts.ratios, 1.0)
                if config.target_kl is not None and kl > 1.5 * config.target_kl:
                    stopped = True
                    break
                norms.append(self._step(is_comparable=phase.rl or phase.cloning > 0.0))
            if stopped:
                break
        fitted = self._fit_values(rollout, returns) if phase.value else {}
        return {
            **loss_metrics(totals),
            "train/grad_norm": float(np.mean(norms)) if norms else 0.0,
            "train/updates": float(self.updates - updates),
            "train/updates_skipped": float(self.skipped - skipped),
            "train/kl_stop": float(stopped),
            **fitted,
        }

    def _fit_values(self, rollout: Rollout, returns: Tensor | None) -> dict[str, float]:
        """Further passes of the value head over the last rollouts, if the configuration says so."""
        head, config = self.policy.value_head, self.config
        if self.memory is None or head is None or returns is None:
            return {}
        assert isinstance(config, PPOConfig)
        self.memory.add(rollout, returns)
        loss = fit_values(
            head,
            self.optimizer,
            self.memory,
            epochs=config.value_epochs,
            max_grad_norm=config.max_grad_norm,
            group=self.group,
            rng=self._rng,
        )
        return {"train/value_fit_loss": loss}

    @torch.no_grad()
    def refer(self, rollout: Rollout, chunks: TensorDict) -> Tensor:
        """Return the reference's log-probabilities: it never changes, so once for all passes.

        Args:
            rollout: Holds the observations.
            chunks: As :func:`gather` returns them.

        Returns:
            (n, *factors) float32, 0 where a chunk is not held.
        """
        assert self.reference is not None
        found = torch.zeros_like(chunks["log_probs"])
        held = chunks["held"].nonzero().squeeze(-1)
        # Task by task, as in micro_batches().
        held = held[chunks["instruction"][held].argsort(stable=True)]
        for at in held.split(self.config.micro_batch_size) if len(held) else ():
            part = chunks[at]
            sample = part["sample"].to(self.reference.device)
            found[at] = self.reference.evaluate(*rollout.inputs(part), sample).log_probs.cpu()
        return found

    def gradient(
        self, rollout: Rollout, chunks: TensorDict, phase: Phase
    ) -> tuple[dict[str, float], Counts]:
        """Fill the gradients with those of one minibatch.

        Each process runs its own chunks in micro-batches; every loss is a sum divided by the count
        over all of the minibatch, so what they add up to is exactly its gradient.

        Args:
            rollout: Holds the observations.
            chunks: This process's share, as :func:`gather` returns it; if some are held, with
                ``reference`` as well, see :meth:`refer`.
            phase: What takes part.

        Returns:
            What :data:`SUMS` names and the counts, over all processes.
        """
        mask = chunks["mask"]
        rl = mask & per_factor(chunks["rl"], mask)
        ratios = rl if self.config.ratio_level == "factor" else rl.flatten(1).any(dim=1)
        held = mask & per_factor(chunks["held"], mask)
        cloned = mask & (phase.cloning > 0.0)
        counted = (rl, ratios, chunks["rl"], held, chunks["valued"], cloned)
        counts = Counts(*self.group.sum([float(x.sum()) for x in counted]).tolist())
        self.optimizer.zero_grad(set_to_none=True)
        sums = dict.fromkeys(SUMS, 0.0)
        for micro in micro_batches(chunks, self.config.micro_batch_size):
            loss, parts = objective(self.policy, self.config, rollout, micro, counts, phase)
            if loss.requires_grad:
                loss.backward()
            for key, value in parts.items():
                sums[key] += float(value)
        self.group.sum_gradients(self.parameters)
        total = self.group.sum([sums[key] for key in SUMS])
        return dict(zip(SUMS, total.tolist(), strict=True)), counts

    def _step(self, *, is_comparable: bool) -> float:
        """Clip and step, or skip the update because of its norm; return the norm.

        Norms of the value head's gradient alone say nothing about what is usual.
        """
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        factor, known = self.config.skip_factor, list(self._norms)
        usual = statistics.median(known) if len(known) >= _NORM_MINIMUM else math.inf
        if not math.isfinite(norm):
            self.skipped += 1
            return 0.0
        # Skipped ones count too: if large norms become usual, learning goes on.
        if is_comparable:
            self._norms.append(norm)
        if factor is not None and norm > factor * usual:
            self.skipped += 1
            return norm
        scale = min(1.0, self.config.max_grad_norm / (norm + 1e-6))
        for grad in grads:
            grad.mul_(scale)
        self.optimizer.step()
        self.policy.bound()
        self.updates += 1
        return norm

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return all that goes on changing, but for the policy's parameters."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "norms": list(self._norms),
            "skipped": self.skipped,
            "updates": self.updates,
            "rng": self._rng.bit_generator.state,
            "values": [] if self.memory is None else self.memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._norms = deque(state["norms"], maxlen=_NORM_HISTORY)
        self.skipped, self.updates = int(state["skipped"]), int(state["updates"])
        self._rng.bit_generator.state = state["rng"]
        # Of several processes the first one alone writes: what the others had played is gone.
        if self.memory is not None:
            self.memory.load_state_dict(state["values"] if self.group.size == 1 else ())
