"""Options of ``vla-gym eval`` and ``vla-gym eval-merge``."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from vla_gym.envs.checks import as_integer, parse_tasks
from vla_gym.errors import ConfigError
from vla_gym.outside import Count, PositiveInt
from vla_gym.rollout import Policy, Start
from vla_gym.suites import choose_suite, get_suite
from vla_gym.suites.libero.protocols import PROTOCOLS, EvalProtocol, ProtocolName
from vla_gym.suites.libero.suite import LiberoSuite
from vla_gym_trainers.evaluation.policy_config import PolicyConfig
from vla_gym_trainers.evaluation.summary import can_be_confused
from vla_gym_trainers.runs.settings import TEST_SEED
from vla_gym_trainers.runs.tasks import SAMPLED_EPISODES, each_once


@dataclass
class EvalConfig(PolicyConfig):
    """Play a policy on LIBERO's official initial states, count successes, write a result card.

    Every task is played from its states 0 .. episodes-1, each once, greedily, or from as many
    sampled layouts. The results do not depend on --num-envs, --workers and --hosts.

    Examples:
      vla-gym eval --suite spatial object goal --out runs/mini
      vla-gym eval --policy runs/td3 --task-ids 9 --out runs/td3/official --paired runs/vla
      vla-gym eval --shards 2/4 --out part2.json
      vla-gym eval-merge part1.json part2.json part3.json part4.json --out card.json
    """

    suite: Annotated[tuple[str, ...], tyro.conf.arg(help_behavior_hint="(default: goal)")] = ()
    """One or several of spatial, object, goal, 10, 90, of the first four's variants (goal-swap,
    goal-object, goal-lan, goal-task, ...), or of installed plug-ins."""
    task_ids: Annotated[tuple[int, ...] | None, tyro.conf.arg(aliases=["--task-id"])] = None
    """Tasks of each suite; default: all."""
    episodes: int | None = None
    """Episodes a task: its official states 0, 1, 2, ...; default: the protocol's, or all, of
    LIBERO's suites 50. Of sampled layouts any number, by default 50."""
    layouts: Literal["official", "sampled"] = "official"
    """Where episodes begin. sampled: at layouts drawn by seed that neither training nor its
    validation has seen, to choose between policies without looking at the official states. Tasks
    that have none, such as those of --bddl-path, begin so in any case."""
    protocol: ProtocolName | None = None
    """Settle, limit, render and replan as a known evaluation does, see docs/evaluation.md: openvla,
    openpi, or libero (LIBERO's own)."""

    num_envs: PositiveInt = 8
    """Environments at once."""
    workers: Count | None = None
    """Worker processes; default: one a core; 0: none."""
    hosts: str | None = None
    """ray, or ray://host:port: a part of the environments on each node of a Ray cluster."""
    torch_threads: PositiveInt = 1
    """Threads of torch, which the rounding may depend on too."""

    out: Path | None = None
    """A directory, for card.json and films/, or the .json file of the result card."""
    resume: bool = False
    """Go on with a run that was cut short, from what it left at --out."""
    shards: str | None = None
    """i/n: play part i of n (from 1) only; put the cards together with vla-gym eval-merge."""
    paired: Path | None = None
    """Another result card to compare with, state by state (McNemar's exact test)."""
    confusion: bool = False
    """Record whose goal became true first, of all tasks of the scene: instruction against achieved
    goal."""
    films: Count = 0
    """Film so many successes and so many failures of each task: videos in films/."""
    progress: bool = True
    """Show a progress bar."""

    def __post_init__(self) -> None:
        """Read the files of ``bddl_path``; they are the suite from then on."""
        if self.bddl_path:
            self.suite = (str(choose_suite(self.suite or None, self.bddl_path)),)
        self.suite, self.bddl_path = self.suite or ("goal",), None

    @property
    def rules(self) -> EvalProtocol:
        """What the protocol fixes."""
        return PROTOCOLS[self.protocol]

    def official_states(self) -> int:
        """Return how many official states each task is played from at most; 0: from none."""
        if self.layouts == "sampled":
            return 0
        return min(get_suite(suite).num_init_states for suite in self.suite)

    def num_states(self) -> int:
        """Return how many states of each task are played: as asked for, or all that all have."""
        return self.episodes or self.rules.episodes or self.official_states() or SAMPLED_EPISODES

    @property
    def first_seed(self) -> int | None:
        """Seed of the first layout where layouts are sampled; else None.

        Far from the seeds of training, so that it has seen none of these layouts.
        """
        return None if self.official_states() else TEST_SEED

    def starts(self) -> tuple[Start, ...]:
        """Return every start: suites as given, then tasks, then states 0..n-1.

        Raises:
            UnknownTaskError: If a suite or task does not exist.
            ConfigError: If a suite or task is named twice, or there is none.
        """
        suites = [get_suite(suite) for suite in self.suite]
        for what, values in (("--suite", [s.name for s in suites]), ("--task-ids", self.task_ids)):
            if values is not None:
                each_once(what, values)
        tasks = [(suite, i) for suite in suites for i in parse_tasks(suite, self.task_ids)]
        if len({suite.tasks[i] for suite, i in tasks}) != len(tasks):
            raise ConfigError(f"--suite names tasks twice: {list(self.suite)}.")
        which = range(self.num_states())
        how = self.episodes_a_look, self.first_seed
        return tuple(Start.number(k, s.name, i, *how) for s, i in tasks for k in which)

    def shard(self) -> tuple[int, int]:
        """Return part and number of parts, (1, 1) without ``--shards``.

        Raises:
            ConfigError: If it is not like ``2/4``.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", self.shards or "1/1")
        part, parts = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= part <= parts:
            raise ConfigError(
                f"--shards must be i/n with 1 <= i <= n, e.g. 2/4; got {self.shards!r:.80}."
            )
        return part, parts

    def my_starts(self) -> tuple[Start, ...]:
        """Return the starts of this shard: every n-th one, so that all take as long.

        Raises:
            ConfigError: If there are none.
        """
        part, parts = self.shard()
        starts = self.starts()
        if part > len(starts):
            raise ConfigError(
                f"--shards {self.shards}: there are only {len(starts)} episodes, give at most "
                f"{len(starts)} parts."
            )
        return starts[part - 1 :: parts]

    def check(self) -> None:
        """Check what can be checked without loading anything.

        Raises:
            ConfigError: If a value is out of range, or two contradict each other.
            UnknownTaskError: If a suite or task does not exist, or has no expert to play it.
        """
        self.check_env()
        if self.episodes is not None:
            as_integer(self.episodes, "--episodes", 1, self.official_states() or None)
        for name in ("resume", "films"):
            if getattr(self, name) and self.out is None:
                raise ConfigError(f"--{name} needs --out: a directory or a .json file.")
        self.check_policy(self.my_starts())
        if self.protocol is not None:
            self._check_protocol()
        suites = dict.fromkeys(start.suite for start in self.starts())
        if self.confusion and not any(map(can_be_confused, suites)):
            raise ConfigError(
                "--confusion needs a suite whose tasks share a scene and differ in their goals, "
                f"such as goal; got {', '.join(suites)}."
            )

    def make_policy(self) -> Policy:
        """Load who acts, and check that he can do what the protocol asks for.

        Raises:
            WeightsError, ConfigError: See :meth:`PolicyConfig.make_policy`.
        """
        rules, asks = self.rules, f"--protocol {self.protocol} asks for"
        asked = replace(self, chunk_len=self.chunk_len or rules.chunk_len)
        policy = super(EvalConfig, asked).make_policy()
        if policy.cameras and rules.image_size not in (None, policy.image_size):
            raise ConfigError(
                f"{asks} renders of {rules.image_size} pixels, {policy.name} looks at "
                f"{policy.image_size}: choose another protocol or policy."
            )
        held = held_options(policy)
        for name, wanted in rules.vla_options.items():
            if held.get(name, wanted) != wanted:
                raise ConfigError(f"{asks} {name}={wanted}, --vla has {name}={held[name]}.")
        return policy

    def _check_protocol(self) -> None:
        asks = f"--protocol {self.protocol} asks for"
        if not all(isinstance(get_suite(suite), LiberoSuite) for suite in self.suite):
            raise ConfigError(f"{asks} LIBERO's suites, one by one; got {', '.join(self.suite)}.")
        if self.first_seed is not None:
            raise ConfigError(
                f"{asks} official states: leave --layouts out; BDDL files of your own have none."
            )
        if (self.episodes or 0) > (most := self.rules.episodes or 0):
            raise ConfigError(f"{asks} {most} episodes a task or fewer; got {self.episodes}.")
        if self.rules.chunk_len not in (None, self.chunk_len or self.rules.chunk_len):
            raise ConfigError(
                f"{asks} chunks of {self.rules.chunk_len} control steps: leave --chunk-len out."
            )


def held_options(policy: Policy) -> dict[str, Any]:
    """Return the options that a policy's VLA is loaded with, defaults too; empty for none."""
    options = getattr(getattr(policy, "vla", None), "options", None)
    return {} if options is None else vars(options)


@dataclass(frozen=True)
class MergeConfig:
    """Put the result cards of shards together; check that they fit; print the table.

    The merged results are those of one run without shards.
    """

    cards: tyro.conf.Positional[tuple[Path, ...]]
    """Result cards of vla-gym eval."""
    out: Path | None = None
    """A directory, or the .json file of the merged card."""
    partial: bool = False
    """Accept that episodes are missing."""
    paired: Path | None = None
    """Another result card to compare with, state by state."""
