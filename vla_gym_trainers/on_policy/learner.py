"""From a rollout with advantages to changed parameters: minibatches, exact accumulation, steps."""

from __future__ import annotations

import math
import statistics
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.config import OnPolicyConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.gradients import LOSSES, SUMS, accumulate, counts_of, means
from vla_gym_trainers.on_policy.minibatches import gather, minibatches, refer
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.policy import Policy
from vla_gym_trainers.on_policy.rollout import Rollout
from vla_gym_trainers.on_policy.student import check_float32
from vla_gym_trainers.on_policy.value_fit import Played, fit_values
from vla_gym_trainers.runs.run_dir import restoring
from vla_gym_trainers.runs.torch_helpers import (
    load_parameters,
    load_tensors,
    save_parameters,
    save_tensors,
)

_NORM_HISTORY, _NORM_MINIMUM = 50, 5
_RL = Phase()


class Learner:
    """Optimises a policy on rollouts; see :meth:`update`.

    Attributes:
        policy: Changed in place.
        reference: Of the KL penalty, a copy of the policy as it begins; None without the penalty.
        optimizer: Adam over what of the policy is trained.
        skipped: Updates skipped so far because of their gradient's norm.
        out_of_memory: Updates skipped so far because a process ran out of memory.
        updates: Updates done so far.
        played: Inputs (n, H) of the value head and returns (n,) of the last rollouts' chunks.
    """

    def __init__(
        self, policy: Policy, config: OnPolicyConfig, *, group: ProcessGroup | None = None
    ) -> None:
        """Make a learner; all processes take over the parameters of process 0.

        With a value head the configuration is PPO's. The seed in it orders the chunks.

        Raises:
            ConfigError: If nothing is trainable.
        """
        named = policy.named_parameters()
        values = [p for name, p in named.items() if name.startswith("value_head.")]
        own = [p for name, p in named.items() if not name.startswith("value_head.")]
        if not own:
            raise ConfigError(
                "Nothing of the policy is trained: give --heads NAMES of the VLA's modules, or "
                "--trainable lora."
            )
        check_float32(own)
        self.policy, self.config = policy, config
        self.group = group or ProcessGroup()
        self.parameters = list(named.values())
        self.group.broadcast(self.parameters)
        self.reference = policy.copy() if config.kl_coef > 0.0 else None
        groups: list[dict[str, Any]] = [{"params": own, "lr": config.learning_rate}]
        if config.sigma_learning_rate is not None:
            noise = [p for name, p in named.items() if name.startswith("noise.")]
            groups[0]["params"] = [p for p in own if all(p is not other for other in noise)]
            groups.append({"params": noise, "lr": config.sigma_learning_rate})
        self.played: Played = deque()
        if isinstance(config, PPOConfig) and values:
            groups.append({"params": values, "lr": config.value_learning_rate})
            self.played = deque(maxlen=config.value_replay)
        # PPO's usual eps: with 1e-8 a gradient that is rounding alone would move a full step.
        self.optimizer = torch.optim.Adam(groups, eps=1e-5)
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.skipped = self.updates = self.out_of_memory = 0
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
        """Learn from a rollout, in a phase that says what takes part.

        See :class:`~.targets.Targets` for the others, [rows, chunks]; a teacher's chunks are left
        out of the surrogate loss in any case.

        Returns:
            Metrics, over the minibatches of this call; see docs/on_policy.md.
        """
        config = self.config
        first, *rest = self._rates
        first = first if phase.learning_rate is None else phase.learning_rate
        for group, rate in zip(self.optimizer.param_groups, (first, *rest), strict=True):
            group["lr"] = rate * phase.rate_share
        head = self.policy.value_head
        returns = None if head is None else returns
        in_windows = self.policy.memory_size and config.sequential_training
        batch = gather(
            self.policy,
            rollout,
            advantages,
            keep,
            returns,
            phase,
            held=self.reference is not None,
            length=config.bptt_length if in_windows else 1,
        )
        if self.reference is not None:
            batch["reference"] = refer(self.reference, rollout, batch, config.micro_batch_size)
        skipped, updates, lost = self.skipped, self.updates, self.out_of_memory
        if self.policy.set_dropout(True):  # by a seed of its own, so that a resumed run repeats
            torch.manual_seed(int(self._rng.integers(2**63)))
        try:
            totals, numbers, norms, stopped = self._passes(rollout, batch, phase)
        finally:
            self.policy.set_dropout(False)
        if self.out_of_memory > lost and not any(numbers.values()):
            raise ConfigError(
                "Every gradient step of an update ran out of memory: take a smaller "
                "micro_batch_size, or gradient_checkpointing."
            )
        metrics = means(totals, numbers) | {
            "train/grad_norm": float(np.mean(norms)) if norms else 0.0,
            "train/updates": float(self.updates - updates),
            "train/updates_skipped": float(self.skipped - skipped),
            "train/out_of_memory": float(self.out_of_memory - lost),
            "train/kl_stop": float(stopped),
            "train/learning_rate": first * phase.rate_share,
        }
        epochs = config.value_epochs if isinstance(config, PPOConfig) else 0
        if phase.value and epochs and head is not None and returns is not None:
            valid = rollout.data["valid"]
            self.played.append((rollout.data["value_input"][valid], returns[valid].cpu()))
            metrics["train/value_fit_loss"] = fit_values(
                head,
                self.optimizer,
                self.played,
                epochs=epochs,
                max_grad_norm=config.max_grad_norm,
                group=self.group,
                rng=self._rng,
            )
        return metrics

    def _passes(
        self, rollout: Rollout, batch: TensorDict, phase: Phase
    ) -> tuple[dict[str, float], dict[str, float], list[float], bool]:
        """Take the steps of an update; return sums, counts, norms, and whether the KL ended it."""
        config, norms = self.config, list[float]()
        totals, numbers = dict.fromkeys(SUMS, 0.0), dict.fromkeys(LOSSES, 0.0)
        for _ in range(phase.epochs or config.epochs):
            parts = phase.num_minibatches or config.num_minibatches
            for chunks in minibatches(batch, parts, self.group, self._rng):
                found = self.gradient(rollout, chunks, phase)
                if found is None or not any(found[1].values()):
                    continue
                sums, counts = found
                for key, value in sums.items():
                    totals[key] += value * counts.get(key, 1.0)
                for key, count in counts.items():
                    numbers[key] += count
                kl = sums["kl"] / max(counts["policy_loss"], 1.0)
                if config.target_kl is not None and kl > 1.5 * config.target_kl:
                    return totals, numbers, norms, True
                norms.append(self._step(phase))
        return totals, numbers, norms, False

    def gradient(
        self, rollout: Rollout, chunks: TensorDict, phase: Phase
    ) -> tuple[dict[str, float], dict[str, float]] | None:
        """Fill the gradients with those of one minibatch, of which ``chunks`` are this process's.

        Returns:
            What :data:`SUMS` names, and the count of each of :data:`LOSSES`, over all processes;
            None, in all of them and without gradients, if one has run out of memory.
        """
        counts = counts_of(chunks, phase, self.config.ratio_level, self.group)
        sums, failed = dict.fromkeys(SUMS, 0.0), 0.0
        self.optimizer.zero_grad(set_to_none=True)
        try:
            sums = accumulate(self.policy, self.config, rollout, chunks, phase, counts)
        except torch.OutOfMemoryError:
            failed = 1.0
        if failed:  # here, where the error no longer holds what did not fit
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.empty_cache()
        if float(self.group.sum([failed])) > 0.0:
            self.optimizer.zero_grad(set_to_none=True)
            self.out_of_memory += 1
            return None
        self.group.sum_gradients(self.parameters)
        total = self.group.sum([sums[key] for key in SUMS])
        return dict(zip(SUMS, total.tolist(), strict=True)), counts

    def _step(self, phase: Phase) -> float:
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
        if phase.rl or phase.cloning > 0.0:
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

    def save(self, folder: Path) -> None:
        """Write all that goes on changing into a checkpoint's folder.

        ``policy.safetensors`` and ``reference.safetensors`` hold what is trained, ``learner.pt``
        the optimiser and the generator. No rollout may be under way; environments need no state,
        for the next rollout begins new episodes by its own seed.
        """
        save_parameters(folder / "policy.safetensors", self.policy.state_dict())
        if self.reference is not None:
            save_parameters(folder / "reference.safetensors", self.reference.state_dict())
        numbers = {
            "optimizer": self.optimizer.state_dict(),
            "norms": list(self._norms),
            "skipped": self.skipped,
            "updates": self.updates,
            "rng": self._rng.bit_generator.state,
            "values": [{"inputs": x, "returns": y} for x, y in self.played],
        }
        save_tensors(folder / "learner.pt", numbers)

    def restore(self, folder: Path) -> None:
        """Take over what :meth:`save` wrote, policy and reference included.

        Raises:
            WeightsError: If a file is missing or damaged.
            ConfigError: If the parameters do not fit the policy.
        """
        with restoring(folder):
            state = load_tensors(folder / "learner.pt")
            self.policy.load_state_dict(load_parameters(folder / "policy.safetensors"))
            if self.reference is not None:
                self.reference.load_state_dict(load_parameters(folder / "reference.safetensors"))
            self.optimizer.load_state_dict(state["optimizer"])
            self._norms = deque(state["norms"], maxlen=_NORM_HISTORY)
            self.skipped, self.updates = int(state["skipped"]), int(state["updates"])
            self._rng.bit_generator.state = state["rng"]
            # Of several processes the first one alone writes: what the others had played is gone.
            played = state["values"] if self.group.size == 1 else ()
            self.played.clear()
            self.played.extend((part["inputs"], part["returns"]) for part in played)
