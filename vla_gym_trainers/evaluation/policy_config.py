"""Options that say who acts and in which world: the same for ``vla-gym eval`` and ``play``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vla_gym.envs.settings import EnvSettings
from vla_gym.errors import ConfigError, UnknownTaskError, WeightsError
from vla_gym.outside import Count, NonNegativeFloat, PositiveInt
from vla_gym.rollout import ExpertPolicy, Policy, RandomPolicy, Start
from vla_gym.rollout.vla_policy import VLAPolicy, held_out_words
from vla_gym.suites import VARIANTS, get_task

POLICIES = ("vla", "expert", "random")


@dataclass
class PolicyConfig(EnvSettings):
    """Who acts, and in which world."""

    bddl_path: tuple[Path, ...] | None = None
    """In place of --suite: BDDL files of your own, or folders of them; see docs/environments.md.
    Episodes begin at layouts sampled by seed."""
    policy: str = "vla"
    """Who acts: vla, expert (scripted, sees the simulation), random, or a trained policy: a run
    directory of vla-gym-train, or its policy.safetensors."""
    vla: str | None = None
    """The frozen VLA: mini, mini-few, mini-flow, <backend>:/path?option=value, or a folder;
    default: mini, or the one of the trained run."""
    rl_token: str | None = None
    """Of a trained policy: folder of its RL token's encoder, auto or mean; default: the run's."""
    device: str = "cpu"
    """Torch device of the VLA, e.g. cuda."""
    head: Literal["l1", "token", "flow"] | None = None
    """Which head of the VLA acts; default: its own first choice."""
    temperature: NonNegativeFloat = 0.0
    """Of the token head: 0 takes the most likely tokens, more samples them."""
    seed: Count = 0
    """Of random actions and sampled tokens; all else is deterministic."""
    phrasing: Literal["original", "held-out"] = "original"
    """Words that the VLA is told a task in: LIBERO's, or some that cloning left out."""
    chunk_len: PositiveInt | None = None
    """Control steps executed a chunk; default: the VLA's horizon. A trained policy has its own."""
    batch_size: PositiveInt = 4
    """Rows of each forward pass of the VLA. The rounding of its actions depends on it, so compare
    and merge results of one batch size."""

    def check_policy(self, starts: Iterable[Start]) -> None:
        """Check what can be checked without loading anything; after :meth:`check_env`.

        Raises:
            ConfigError: If a value is out of range, or two contradict each other.
            UnknownTaskError: If the expert shall act and a task has none.
        """
        if self.temperature > 0.0 and self.head != "token":
            raise ConfigError("--temperature samples from the token head: add --head token.")
        for name, usual in (("phrasing", "original"), ("head", None)):
            if self.policy != "vla" and getattr(self, name) != usual:
                raise ConfigError(f"--{name} belongs to --policy vla, got --policy {self.policy}.")
        if self.rl_token is not None and self.policy in POLICIES:
            raise ConfigError(
                f"--rl-token belongs to a trained policy, got --policy {self.policy}: leave it out."
            )
        if self.vla is not None and not self.needs_torch:
            raise ConfigError(f"--vla has nothing to do with --policy {self.policy}: leave it out.")
        if self.policy == "expert":
            _check_experts(starts)
        if self.phrasing == "held-out":
            for start in starts:
                held_out_words(get_task(start.suite, start.task_id).instruction)
        if self.policy not in POLICIES:
            self._check_told_tasks({start.suite for start in starts})

    def _check_told_tasks(self, suites: Iterable[str]) -> None:
        """Refuse suites in which the tasks that a policy with ``use_task_id`` is told are others.

        What it was trained on stands in its run's configuration; without that nothing is refused.
        """
        from vla_gym_trainers.evaluation.trained import trained_on

        path = Path(self.policy).expanduser()
        if not path.exists() or not (run := trained_on(path)).use_task_id:
            return
        known = _numbered(run.suite)
        if others := sorted(suite for suite in suites if _numbered(suite) != known):
            raise ConfigError(
                f"{self.policy} is told which task of {known} it plays (use_task_id), and cannot "
                f"play {', '.join(others)}: choose --suite {known} or a variant of it, or train "
                "with --no-use-task-id."
            )

    @property
    def needs_torch(self) -> bool:
        """Whether a network acts."""
        return self.policy not in ("expert", "random")

    def make_policy(self) -> Policy:
        """Load who acts.

        Raises:
            WeightsError: If there is no such policy, or a file is damaged.
            ConfigError: If the parts do not fit each other.
        """
        if self.policy == "expert":
            return ExpertPolicy(self.chunk_len or 8)
        if self.policy == "random":
            return RandomPolicy(self.seed, self.chunk_len or 8)
        if self.policy == "vla":
            return VLAPolicy(
                self.vla or "mini",
                head=self.head,
                temperature=self.temperature,
                seed=self.seed,
                chunk_len=self.chunk_len,
                batch_size=self.batch_size,
                phrasing=self.phrasing,
                device=self.device,
            )
        path = Path(self.policy).expanduser()
        if not path.exists():
            raise WeightsError(
                f"--policy {self.policy}: expected {', '.join(POLICIES)}, a run directory of "
                "vla-gym-train or its policy.safetensors; there is no such file."
            )
        policy = self._of_run(path)
        if self.chunk_len not in (None, policy.chunk_len):
            raise ConfigError(
                f"The policy acts in chunks of {policy.chunk_len}, not of {self.chunk_len}: leave "
                "--chunk-len, or the --protocol that asks for it, out."
            )
        return policy

    def _of_run(self, path: Path) -> Policy:
        """Return what a run has trained: a policy on the VLA's features, or the VLA itself."""
        from vla_gym_trainers.evaluation.trained import (
            HEADS,
            load_trained,
            policy_file,
            trained_on,
            trained_vla,
        )

        run = trained_on(path) if policy_file(path) is None else None
        if self.rl_token is not None and run is not None:
            raise ConfigError(f"{path} takes no --rl-token: its policy is the VLA, or has its own.")
        if run is not None and (run.hidden_cameras or run.memory_size):
            # No plain VLA plays it: it sees less or remembers more than its VLA.
            from vla_gym_trainers.explorer.player import load_player

            return load_player(path, vla=self.vla, device=self.device, batch_size=self.batch_size)
        if run is not None and (vla := trained_vla(path, self.vla or run.vla)):
            policy = VLAPolicy(
                vla,
                head=HEADS.get(run.policy),
                chunk_len=self.chunk_len,
                batch_size=self.batch_size,
                device=self.device,
                allow_class=self.vla is not None,
            )
            policy.name = policy.identity["run"] = path.name
            return policy
        return load_trained(
            path, self.vla, self.batch_size, rl_token=self.rl_token, device=self.device
        )


def _numbered(suite: str) -> str:
    """Return the suite whose numbers tasks have here: variants number what they vary alike."""
    parts = suite.split("+")
    names = [p.removeprefix("libero_").replace("_", "-") if "libero_" in p else p for p in parts]
    return "+".join(name.partition("-")[0] if name in VARIANTS else name for name in names)


def _check_experts(starts: Iterable[Start]) -> None:
    from vla_gym.experts import EXPERT_TASKS

    for task in dict.fromkeys(get_task(start.suite, start.task_id) for start in starts):
        if task.task_id not in EXPERT_TASKS.get(task.suite, ()):
            raise UnknownTaskError(
                f"No expert for task {task.task_id} of suite {task.suite!r}: see 'vla-gym tasks', "
                "or let another policy act."
            )
