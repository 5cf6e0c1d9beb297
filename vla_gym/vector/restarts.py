"""What happens when a worker fails: it is started again, and what it was doing is settled."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING

import numpy as np
from gymnasium.vector import AutoresetMode

from vla_gym.errors import WorkerError, WorkerRestartWarning
from vla_gym.vector.pool import Failure
from vla_gym.vector.shared_memory import INFO_BITS, RESET, STEP

if TYPE_CHECKING:
    from vla_gym.vector.runner import Runner


def recover(runner: Runner, worker: int, failure: Failure) -> Exception | None:
    """Restart a failed worker, settle its steps and do its resets again."""
    block = runner.blocks[worker]
    message = _describe(runner, worker, failure)
    runner.failures[worker] += 1
    # What its environments raise when they are first built, they raise each time.
    hopeless = failure.error is not None or (failure.raised and worker not in runner.ready)
    if runner.failures[worker] > runner.max_restarts:
        hopeless = True
        message += (
            f"\nThat was failure {runner.failures[worker]} in a row without an episode of its "
            f"environments ending (max_restarts={runner.max_restarts}): giving up."
        )
    if hopeless or not runner.restart:
        runner.give_up(block)
        runner.broken = message
        return failure.error or WorkerError(message)
    try:
        runner.pool.respawn(worker)
    except BaseException:
        runner.give_up(block)
        runner.broken = message
        raise
    # Whatever it knew is gone: environments are seeded again, calls get no answer.
    if runner.table:
        runner.table["reseed"][block] = True
    runner.values[worker] = WorkerError(message)
    busy, idle = block[runner.busy[block]], block[~runner.busy[block]]
    runner.lost[idle[~runner.ended[idle]]] = True
    runner.restarted[busy] = True
    for i in busy.tolist():
        if runner.table["op"][i] == STEP:
            settle_lost_step(runner, i)
    again = block[runner.busy[block]]
    if len(again):
        runner.dispatch(again)
    note = "The worker was restarted."
    warnings.warn(f"{message}\n{note}", WorkerRestartWarning, stacklevel=outside())
    return None


def settle_lost_step(runner: Runner, i: int) -> None:
    """Settle a step that died with its worker: truncated, at the last observation."""
    table, last, target = runner.table, runner.half[i], 1 - runner.half[i]
    runner.killed[i] = True
    same_step = runner.mode == AutoresetMode.SAME_STEP
    prefix = "final_info" if same_step else "info"
    for key, values in runner.known.items():
        table[key.replace("info", prefix, 1)][i] = values[i]
    for key, value in (
        ("success", False),
        ("is_success", False),
        ("executed_steps", 0),
        ("discount", 1.0),
    ):
        table[f"{prefix}/{key}"][i] = value
    if same_step:
        for name in runner.obs_columns:
            table[f"final_{name}"][i] = table[name][last, i]
        table["op"][i] = RESET
        return
    for name in runner.obs_columns:
        table[name][target, i] = table[name][last, i]
    table["reward"][i], table["terminated"][i], table["truncated"][i] = 0.0, False, True
    table["did_reset"][i] = table["episode_ended"][i] = False
    runner.finish(np.array([i]), {})


def _describe(runner: Runner, worker: int, failure: Failure) -> str:
    block = runner.blocks[worker]
    doing = failure.command
    if not failure.started:
        doing = "start"
    elif doing == "run":
        ops = runner.table["op"][block[runner.busy[block]]].tolist()
        doing = " and ".join(name for name, op in (("step", STEP), ("reset", RESET)) if op in ops)
    names = []
    for i in block.tolist():
        episode, task = runner.next_episode[i] - 1, ""
        if episode >= 0 and int(runner.known["info_set"][i]) & INFO_BITS["task_id"]:
            task = f"task {runner.known['info/task_id'][i]}, "
        names.append(f"{i} ({task}episode {episode})" if episode >= 0 else f"{i}")
    return (
        f"Worker {worker} with environments {', '.join(names)} failed during {doing}. It "
        f"{failure.reason}"
    )


def outside() -> int:
    """Return the ``stacklevel`` of the first caller outside of this package."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("vla_gym."):
        frame, level = frame.f_back, level + 1
    return level
