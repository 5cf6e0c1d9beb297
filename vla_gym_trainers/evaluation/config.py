"""Options of ``vla-gym eval`` and ``vla-gym eval-merge``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vla_gym.envs.checks import as_integer
from vla_gym.errors import ConfigError
from vla_gym.suites import get_suite

POLICIES = ("vla", "expert", "random")


@dataclass(frozen=True)
class EvalConfig:
    """Play a policy on LIBERO's official initial states, count successes, write a result card.

    Every task is played from its states 0 .. episodes-1, each once, greedily. The results do not
    depend on --num-envs and --workers.

    Examples:
      vla-gym eval --suite spatial object goal --out runs/mini
      vla-gym eval --policy runs/td3-goal-9 --task-ids 9 --out runs/td3 --paired runs/vla/card.json
      vla-gym eval --shards 2/4 --out part2.json
      vla-gym eval-merge part1.json part2.json part3.json part4.json --out card.json
    """

    policy: str = "vla"
    """Who acts: vla, expert (scripted, sees the simulation), random, or a trained policy: a run
    directory of vla-gym-train, or a .zip of its td3."""
    suite: tuple[str, ...] = ("goal",)
    """One or several of spatial, object, goal, 10, 90, or of installed plug-ins."""
    task_ids: Annotated[tuple[int, ...] | None, tyro.conf.arg(aliases=["--task-id"])] = None
    """Tasks of each suite; default: all."""
    episodes: int | None = None
    """Episodes a task: its official states 0, 1, 2, ...; default: all, of LIBERO's suites 50."""

    vla: str | None = None
    """The frozen VLA: mini, mini-few, <backend>:/path?option=value, or a folder; default: mini, or
    the one of the trained run."""
    rl_token: str | None = None
    """Of a trained policy: folder of its RL token's encoder, auto or mean; default: the run's."""
    device: str = "cpu"
    """Torch device of the VLA, e.g. cuda."""
    head: Literal["l1", "token"] = "l1"
    """Which head of the VLA acts."""
    temperature: float = 0.0
    """Of the token head: 0 takes the most likely tokens, more samples them."""
    seed: int = 0
    """Of random actions and sampled tokens; all else is deterministic."""
    phrasing: Literal["original", "held-out"] = "original"
    """Words that the VLA is told a task in: LIBERO's, or some that cloning left out."""
    chunk_len: int | None = None
    """Control steps executed a chunk; default: the VLA's horizon. A trained policy has its own."""
    assets: str = "lite"
    """Asset pack: lite, libero, auto (libero if it is there), or a path."""
    physics: Literal["fast", "exact"] = "fast"
    """Physics mode."""

    num_envs: int = 8
    """Environments at once."""
    workers: int | None = None
    """Worker processes; default: one a core; 0: none."""
    batch_size: int = 4
    """Rows of each forward pass of the VLA. The rounding of its actions depends on it, so compare
    and merge results of one batch size."""
    torch_threads: int = 1
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
    films: int = 0
    """Film so many successes and so many failures of each task: videos and a film strip."""
    progress: bool = True
    """Show a progress bar."""

    def num_states(self) -> int:
        """Return the number of official states that tasks of all suites have.

        Raises:
            UnknownTaskError: If there is no such suite.
        """
        return min((get_suite(suite).num_init_states for suite in self.suite), default=0)

    def check(self) -> None:
        """Check what can be checked without loading anything.

        Raises:
            ConfigError: If a value is out of range, or two contradict each other.
        """
        if self.episodes is not None:
            as_integer(self.episodes, "--episodes", 1, self.num_states())
        for name, low in (("num_envs", 1), ("batch_size", 1), ("torch_threads", 1), ("films", 0)):
            as_integer(getattr(self, name), f"--{name.replace('_', '-')}", low)
        as_integer(self.seed, "--seed", 0)
        if self.workers is not None:
            as_integer(self.workers, "--workers", 0)
        if self.chunk_len is not None:
            as_integer(self.chunk_len, "--chunk-len", 1)
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature must be 0 or more, got {self.temperature}.")
        if self.temperature > 0.0 and self.head != "token":
            raise ConfigError("--temperature samples from the token head: add --head token.")
        if self.policy != "vla" and self.phrasing != "original":
            raise ConfigError(f"--phrasing belongs to --policy vla, got --policy {self.policy}.")
        without_vla = self.policy in ("expert", "random")
        if self.policy != "vla" and self.head != "l1":
            raise ConfigError(f"--head belongs to --policy vla, got --policy {self.policy}.")
        if self.rl_token is not None and self.policy in POLICIES:
            raise ConfigError(
                f"--rl-token belongs to a trained policy, got --policy {self.policy}: leave it out."
            )
        if without_vla and self.vla is not None:
            raise ConfigError(f"--vla has nothing to do with --policy {self.policy}: leave it out.")
        needs_out = [n for n in ("resume", "films") if getattr(self, n)]
        if needs_out and self.out is None:
            raise ConfigError(f"--{needs_out[0]} needs --out: a directory or a .json file.")


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
