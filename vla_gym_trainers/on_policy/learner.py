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
from vla_gym_trainers.on_policy.distributed import World
from vla_gym_trainers.on_policy.minibatches import gather, inputs_of, micro_batches, split
from vla_gym_trainers.on_policy.objective import LOSSES, SUMS, Counts, loss_metrics, objective
from vla_gym_trainers.on_policy.policy import TokenPolicy
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.settings import LearnerSettings, Weights
from vla_gym_trainers.on_policy.value_fit import ValueMemory, fit_values

__all__ = ["Learner", "LearnerSettings", "Weights"]

_NORM_HISTORY, _NORM_MINIMUM = 50, 5
_EVERYTHING = Weights()


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
        policy: TokenPolicy,
        settings: LearnerSettings,
        *,
        reference: TokenPolicy | None = None,
        world: World | None = None,
        seed: int = 0,
    ) -> None:
        """Make a learner; all processes take over the parameters of process 0.

        Args:
            policy: What is trained.
            settings: See :class:`LearnerSettings`.
            reference: Of the KL penalty; needed if ``kl_coef`` is positive.
            world: The processes that learn together.
            seed: Of the order of chunks.

        Raises:
            ConfigError: If nothing is trainable, or the reference is missing.
        """
        if settings.kl_coef > 0.0 and reference is None:
            raise ConfigError("kl_coef > 0 needs a reference policy.")
        named = policy.named_parameters()
        if not any(name.startswith("vla.") for name in named):
            raise ConfigError("Nothing of the VLA is trained: see trainable_copy().")
        self.policy, self.settings, self.reference = policy, settings, reference
        self.world = world or World()
        self.parameters = list(named.values())
        self.world.broadcast(self.parameters)
        groups = []
        for prefix, rate in (
            ("vla.", settings.learning_rate),
            ("value_head.", settings.value_learning_rate),
        ):
            own = [p for name, p in named.items() if name.startswith(prefix)]
            groups += [{"params": own, "lr": rate}] if own else []
        # PPO's usual eps: with 1e-8 a gradient that is rounding alone would move a full step.
        self.optimizer = torch.optim.Adam(groups, eps=1e-5)
        self.skipped = self.updates = 0
        self._norms: deque[float] = deque(maxlen=_NORM_HISTORY)
        self._memory = ValueMemory(settings.value_replay)
        self._rng = np.random.default_rng(seed)

    def update(
        self,
        rollout: Rollout,
        advantages: Tensor,
        keep: Tensor,
        returns: Tensor | None = None,
        weights: Weights = _EVERYTHING,
    ) -> dict[str, float]:
        """Learn from a rollout.

        Args:
            rollout: What was played.
            advantages: [rows, chunks].
            keep: [rows, chunks] bool: chunks of the surrogate loss. Those of a teacher are left
                out of it.
            returns: [rows, chunks], of the value head.
            weights: What takes part.

        Returns:
            Metrics, over the minibatches of this call; see docs/on_policy.md.
        """
        settings = self.settings
        rate = weights.learning_rate
        self.optimizer.param_groups[0]["lr"] = settings.learning_rate if rate is None else rate
        if self.policy.value_head is None:
            returns = None
        held = settings.kl_coef > 0.0
        batch = gather(rollout, advantages, keep, returns, weights, held=held)
        if held:
            batch["reference"] = self.refer(rollout, batch)
        totals = dict.fromkeys((*SUMS, *Counts._fields), 0.0)
        norms: list[float] = []
        stopped, skipped, updates = False, self.skipped, self.updates
        for _ in range(weights.epochs or settings.epochs):
            parts = weights.num_minibatches or settings.num_minibatches
            for part in split(len(batch), parts, self.world, self._rng):
                chunks = batch[torch.from_numpy(part)]
                sums, counts = self.gradient(rollout, chunks, weights)
                if not any(counts):
                    continue
                known = {**counts._asdict(), **sums}
                for key, value in known.items():
                    totals[key] += value * known.get(LOSSES.get(key, ""), 1.0)
                target = settings.target_kl
                kl = sums["kl"] / max(counts.ratios, 1.0)
                if target is not None and kl > 1.5 * target:
                    stopped = True
                    break
                norms.append(self._step())
            if stopped:
                break
        fitted = {}
        head = self.policy.value_head
        if head is not None and returns is not None and weights.value and settings.value_epochs:
            self._memory.add(rollout, returns)
            fitted["train/value_fit_loss"] = fit_values(
                head,
                self.optimizer,
                self._memory,
                epochs=settings.value_epochs,
                max_grad_norm=settings.max_grad_norm,
                world=self.world,
                rng=self._rng,
            )
        return {
            **loss_metrics(totals),
            "train/grad_norm": float(np.mean(norms)) if norms else 0.0,
            "train/updates": float(self.updates - updates),
            "train/updates_skipped": float(self.skipped - skipped),
            "train/kl_stop": float(stopped),
            **fitted,
        }

    @torch.no_grad()
    def refer(self, rollout: Rollout, chunks: TensorDict) -> Tensor:
        """Return the reference's log-probabilities: it never changes, so once for all passes.

        Args:
            rollout: Holds the frames.
            chunks: As :func:`gather` returns them.

        Returns:
            (n, C, 7) float32, 0 where a chunk is not held.
        """
        assert self.reference is not None
        found = torch.zeros_like(chunks["log_probs"])
        held = chunks["held"].nonzero().squeeze(-1)
        # Task by task, as in micro_batches().
        held = held[chunks["instruction"][held].argsort(stable=True)]
        for at in held.split(self.settings.micro_batch_size) if len(held) else ():
            part = chunks[at]
            tokens = part["tokens"].long().to(self._device)
            found[at] = self.reference.evaluate(*inputs_of(rollout, part), tokens).log_probs.cpu()
        return found

    def gradient(
        self, rollout: Rollout, chunks: TensorDict, weights: Weights
    ) -> tuple[dict[str, float], Counts]:
        """Fill the gradients with those of one minibatch.

        Each process runs its own chunks in micro-batches; every loss is a sum divided by the count
        over all of the minibatch, so what they add up to is exactly its gradient.

        Args:
            rollout: Holds the frames.
            chunks: This process's share, as :func:`gather` returns it; if some are held, with
                ``reference`` as well, see :meth:`refer`.
            weights: What takes part.

        Returns:
            What :data:`SUMS` names and the counts, over all processes.
        """
        rl = chunks["mask"] & chunks["rl"][:, None, None]
        ratios = rl if self.settings.ratio_level == "token" else rl.flatten(1).any(dim=1)
        held = chunks["mask"] & chunks["held"][:, None, None]
        cloned = chunks["mask"] & (weights.cloning > 0.0)
        here = [float(x.sum()) for x in (rl, ratios, held, chunks["valued"], cloned)]
        counts = Counts(*self.world.sum(here).tolist())
        self.optimizer.zero_grad(set_to_none=True)
        sums = dict.fromkeys(SUMS, 0.0)
        for micro in micro_batches(chunks, self.settings.micro_batch_size):
            loss, parts = objective(self.policy, self.settings, rollout, micro, counts, weights)
            if loss.requires_grad:
                loss.backward()
            for key, value in parts.items():
                sums[key] += float(value)
        self.world.sum_gradients(self.parameters)
        total = self.world.sum([sums[key] for key in SUMS])
        return dict(zip(SUMS, total.tolist(), strict=True)), counts

    @property
    def _device(self) -> torch.device:
        return self.parameters[0].device

    def _step(self) -> float:
        """Clip and step, or skip the update because of its norm; return the norm."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        factor, known = self.settings.skip_factor, list(self._norms)
        usual = statistics.median(known) if len(known) >= _NORM_MINIMUM else math.inf
        if not math.isfinite(norm):
            self.skipped += 1
            return 0.0
        # Skipped ones count too: if large norms become usual, learning goes on.
        self._norms.append(norm)
        if factor is not None and norm > factor * usual:
            self.skipped += 1
            return norm
        scale = min(1.0, self.settings.max_grad_norm / (norm + 1e-6))
        for grad in grads:
            grad.mul_(scale)
        self.optimizer.step()
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
            "values": self._memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self.optimizer.load_state_dict(state["optimizer"])
        self._norms = deque(state["norms"], maxlen=_NORM_HISTORY)
        self.skipped, self.updates = int(state["skipped"]), int(state["updates"])
        self._rng.bit_generator.state = state["rng"]
        # Of several processes the first one alone writes: what the others had played is gone.
        alone = self.world.size == 1
        self._memory.load_state_dict(state.get("values", ()) if alone else ())
