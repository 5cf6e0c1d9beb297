"""Runs scenarios: starts the systems, lets them take turns, collects the rounds."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from vla_gym.cli.bench.actions import FixedActions
from vla_gym.cli.bench.host_process import BenchError, HostProcess
from vla_gym.cli.bench.procfs import available_memory_mb
from vla_gym.cli.bench.results import speed_round, summarise
from vla_gym.cli.bench.spec import Contender, Scenario
from vla_gym.errors import VlaGymError

#: A round lets a system play until this much time is measured, so that fast and slow ones get
#: figures of like precision, but no more often than _MAX_PLAYS times.
WINDOW_S = 1.0
#: The same where two nearly equal figures are compared: many short rounds beside each other.
SHORT_WINDOW_S = 0.4
_MAX_PLAYS = 10
# Resets of one environment use other states than those of all, so that each is a first visit.
_OTHER_STATE = 25
_NUM_STATES = 50
# Upstream's environments with cameras took 1.1 to 1.4 GB each on llvmpipe, ours half of that.
_GUESSED_MB = 1500.0
_MEMORY_SHARE = 0.6

Figures = dict[str, Any]
Step = Callable[[str], None]


def _ignore(_: str) -> None:
    pass


class Measurement:
    """Measures scenarios one after the other."""

    def __init__(
        self,
        rounds: int,
        actions: FixedActions,
        environ: Mapping[str, str],
    ) -> None:
        """Remember the settings.

        Args:
            rounds: Measured rounds of scenarios that do not say.
            actions: What is played.
            environ: Environment variables of every process, e.g. thread counts.
        """
        self._rounds, self._actions, self._environ = rounds, actions, environ
        self._advance: Step = _ignore
        self._worker_mb: dict[tuple[str, int], float] = {}

    def count_of(self, scenario: Scenario) -> int:
        """Return how often :meth:`run` calls ``advance``."""
        rounds = scenario.rounds or self._rounds
        turns = rounds if scenario.kind == "startup" else rounds + 2
        return turns * len(scenario.contenders)

    def run(self, scenario: Scenario, advance: Step = _ignore) -> dict[str, Any]:
        """Measure a scenario; a contender that fails is named in it and the others go on.

        Args:
            scenario: What to measure.
            advance: Called with a line of text before each thing that takes a while, as often as
                :meth:`count_of` says.

        Returns:
            See :func:`vla_gym.cli.bench.results.summarise`; and ``load``, the average load
            of the minute before the beginning and before the end.
        """
        self._advance = advance
        measure = self._starts if scenario.kind == "startup" else self._interleaved
        rounds: dict[str, list[Figures]] = {c.key: [] for c in scenario.contenders}
        failed: dict[str, str] = {}
        notes = list(scenario.notes)
        before = os.getloadavg()[0]
        measure(scenario, rounds, failed, notes)
        load = [before, os.getloadavg()[0]]
        return {**summarise(scenario, rounds, failed, notes), "load": load}

    def _starts(
        self,
        scenario: Scenario,
        rounds: dict[str, list[Figures]],
        failed: dict[str, str],
        notes: list[str],
    ) -> None:
        """Start, play a little and end, one system at a time, in turns."""
        for index in range(scenario.rounds or self._rounds):
            for contender in scenario.contenders:
                self._advance(f"{scenario.key}: {contender.label}, start {index + 1}")
                if contender.key in failed:
                    continue
                try:
                    rounds[contender.key].append(self._start(scenario, contender, notes))
                except VlaGymError as error:
                    failed[contender.key] = str(error)

    def _start(self, scenario: Scenario, contender: Contender, notes: list[str]) -> Figures:
        groups = self._fitting_groups(contender)
        if len(groups) > 1:
            remark = (
                f"{contender.label}: {contender.num_envs} environments need more memory than is "
                f"free; started in {len(groups)} groups one after the other, times added up."
            )
            if remark not in notes:
                notes.append(remark)
        parts = []
        for group in groups:
            with ExitStack() as stack:
                host = self._begin(group, stack)
                figures = {"start_s": host.start_s, "start_cpu_s": host.cpu_s()}
                if scenario.chunks:
                    self._reset(host, 0)
                    self._play(host, scenario)
                memory = host.memory()
                figures["pss_mb"] = max(memory["workers_mb"])
                figures["all_mb"] = memory["all_mb"]
                parts.append(figures)
                host.close()
        worst = max(part["pss_mb"] for part in parts)
        self._worker_mb[contender.system, contender.env.image_size] = worst
        return {
            "start_s": sum(part["start_s"] for part in parts),
            "start_cpu_s": sum(part["start_cpu_s"] for part in parts),
            "pss_mb": worst,
            "all_mb": sum(part["all_mb"] for part in parts),
        }

    def _fitting_groups(self, contender: Contender) -> list[Contender]:
        """Split a contender of upstream's whose environments do not fit into memory at once."""
        if contender.system != "libero":
            return [contender]
        size = contender.env.image_size
        each = self._worker_mb.get((contender.system, size), _GUESSED_MB)
        fit = max(1, int(_MEMORY_SHARE * available_memory_mb() / each))
        count, tasks = contender.num_envs, contender.env.task_ids
        if fit >= count:
            return [contender]
        groups = []
        for begin in range(0, count, fit):
            rows = min(fit, count - begin)
            own = tuple(tasks[(begin + i) % len(tasks)] for i in range(rows))
            env = replace(contender.env, task_ids=own)
            groups.append(replace(contender, num_envs=rows, workers=rows, env=env))
        return groups

    def _interleaved(
        self,
        scenario: Scenario,
        rounds: dict[str, list[Figures]],
        failed: dict[str, str],
        notes: list[str],
    ) -> None:
        """Keep all systems alive and let them take turns; the first round only warms up."""
        with ExitStack() as stack:
            hosts: dict[str, HostProcess] = {}
            plays: dict[str, int] = {}
            for contender in scenario.contenders:
                self._advance(f"{scenario.key}: {contender.label}, start")
                try:
                    hosts[contender.key] = self._begin(contender, stack)
                except VlaGymError as error:
                    failed[contender.key] = str(error)
            for index in range((scenario.rounds or self._rounds) + 1):
                for contender in scenario.contenders:
                    turn = "warm-up" if index == 0 else f"round {index}"
                    self._advance(f"{scenario.key}: {contender.label}, {turn}")
                    key = contender.key
                    if key in failed:
                        continue
                    try:
                        count = plays.get(key, 1)
                        figures, seconds = self._turn(scenario, hosts[key], index, count)
                    except BenchError as error:
                        failed[key] = str(error)
                        hosts[key].kill()  # a system that hangs would disturb the others
                        continue
                    window = SHORT_WINDOW_S if scenario.kind == "scaling" else WINDOW_S
                    plays[key] = min(_MAX_PLAYS, math.ceil(window / seconds))
                    if index > 0:
                        rounds[key].append(figures)
            for key, host in hosts.items():
                if ended := sum(figures.get("ended", 0) for figures in rounds[key]):
                    notes.append(f"{host.contender.label}: {ended:.0f} episodes ended meanwhile.")
                host.close()

    def _turn(
        self, scenario: Scenario, host: HostProcess, index: int, count: int
    ) -> tuple[Figures, float]:
        """Let a system reset and play; returns its figures and the seconds of one play."""
        figures: Figures = {}
        plays = []
        if scenario.kind == "speed":
            other = index + _OTHER_STATE
            states = self._states(host.contender, other)
            figures["reset_one_s"] = host.call("reset_one", other % _NUM_STATES, states)
        for number in range(count):
            reset = self._reset(host, index)
            if number == 0 and scenario.kind == "speed":
                figures["reset_s"] = reset["settled_s"]
                figures["reset_plain_s"] = reset.get("plain_s", reset["settled_s"])
            plays.append(self._play(host, scenario))
        seconds = sum(play["seconds"] for play in plays) / count
        chunk_len = host.contender.env.chunk_len
        if scenario.kind == "overhead":
            overheads = np.concatenate([play["overheads_s"] for play in plays])
            figures["overhead_us"] = 1e6 * float(np.median(overheads))
            figures["overhead_p10_us"] = 1e6 * float(np.percentile(overheads, 10))
            beyond = np.concatenate([play["beyond_envs_s"] for play in plays])
            figures["beyond_envs_us"] = 1e6 * float(np.median(beyond))
            return figures, seconds
        figures |= speed_round(plays, chunk_len)
        if scenario.kind == "profile":
            calls = sum(play["calls"] for play in plays)
            for part in plays[0]["split_s"]:
                total = sum(play["split_s"][part] for play in plays)
                figures[f"{part}_ms"] = 1e3 * total / calls
        return figures, seconds

    def _begin(self, contender: Contender, stack: ExitStack) -> HostProcess:
        """Start a system; when the stack unwinds, whatever is left of it is killed."""
        host = HostProcess(contender, self._environ)
        stack.callback(host.kill)
        try:
            host.wait_started()
        except BenchError:
            host.kill()  # what hangs would disturb the others
            raise
        return host

    def _reset(self, host: HostProcess, index: int) -> dict[str, float]:
        states = self._states(host.contender, index)
        result: dict[str, float] = host.call("reset", index % _NUM_STATES, states)
        return result

    def _play(self, host: HostProcess, scenario: Scenario) -> Figures:
        contender = host.contender
        steps = scenario.chunks * contender.env.chunk_len
        actions = self._actions.batch(contender.num_envs, steps)
        before = host.cpu_s()
        result: Figures = host.call("play", actions)
        return {**result, "cpu_s": host.cpu_s() - before}

    def _states(self, contender: Contender, index: int) -> np.ndarray | None:
        """Return the official states that upstream is set to; ours only needs their number."""
        if contender.system != "libero":
            return None
        from vla_gym.suites import get_task
        from vla_gym.suites.libero import load_task_model

        spec = contender.env
        tasks = [get_task(spec.suite, spec.task_of(i)) for i in range(contender.num_envs)]
        models = {task: load_task_model(task, spec.assets) for task in dict.fromkeys(tasks)}
        return np.stack([models[task].init_states[index % _NUM_STATES] for task in tasks])
