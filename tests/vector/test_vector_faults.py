"""Workers that die, hang or raise: right flags, and the others never notice."""

import os
import signal
import time
import warnings

import numpy as np
import pytest
from stub_envs import LIMIT, PAUSE_S, SUCCESS, Gate, stub_image
from vector_processes import alive, wait_until
from vector_reference import (
    CRASHES,
    DISABLED,
    HANG_S,
    NEXT_STEP,
    SAME_STEP,
    advance,
    begin,
    by_autoreset,
    by_mode,
    check_cells,
    follower,
    info_row,
    plain_reset,
)

from vla_gym.errors import WorkerError, WorkerRestartWarning

pytestmark = pytest.mark.usefixtures("nothing_stays")
#: The ways to fail, and what the warning says.
FAULTS = {**CRASHES, "SIGSTOP": f"no progress for {HANG_S:g} s"}


# The fault rule, to the letter: a table written by hand. Workers have envs 0 and 1, 2 and 3; env 0
# crashes in step 2 of its first episode. Cells as in check_cells; a tuple is a reset.

SCRIPTS = {
    0: {"script": [(3, LIMIT)]},
    1: {"script": [(1, SUCCESS), (3, LIMIT)]},
    2: {"script": [(2, SUCCESS), (3, LIMIT)]},
    3: {"script": [(3, LIMIT)]},
}
TABLES = {
    NEXT_STEP: [
        ["0.1 0.25 - step", "0.1 1.25 T step =1.25/4/1", "0.1 0.25 - step", "0.1 0.25 - step"],
        # Env 1 was being reset: it is reset again, and its row says no more than that.
        ["0.1 0 C lost", "1.0 0 - reset", "0.2 1.5 T step =1.75/8/1", "0.2 0.5 - step"],
        ["1.0 0 - reset", "1.1 0.25 - step", "1.0 0 - reset", "0.3 0.75 C step =1.5/12/0"],
        ["1.1 0.25 - step", "1.2 0.5 - step", "1.1 0.25 - step", "1.0 0 - reset"],
        ["1.2 0.5 - step", "1.3 0.75 C step =1.5/12/0", "1.2 0.5 - step", "1.1 0.25 - step"],
    ],
    SAME_STEP: [
        [
            "0.1 0.25 - step",
            "1.0 1.25 T reset <0.1 =1.25/4/1",
            "0.1 0.25 - step",
            "0.1 0.25 - step",
        ],
        [
            "1.0 0 C lost <0.1",
            "2.0 0 C lost <1.0",
            "1.0 1.5 T reset <0.2 =1.75/8/1",
            "0.2 0.5 - step",
        ],
        [
            "1.1 0.25 - step",
            "2.1 0.25 - step",
            "1.1 0.25 - step",
            "1.0 0.75 C reset <0.3 =1.5/12/0",
        ],
    ],
    DISABLED: [
        ["0.1 0.25 - step", "0.1 1.25 T step =1.25/4/1", "0.1 0.25 - step", "0.1 0.25 - step"],
        ([1], "0.1 1.0 0.1 0.1"),
        ["0.1 0 C lost", "1.0 0 C lost", "0.2 1.5 T step =1.75/8/1", "0.2 0.5 - step"],
        ([0, 1, 2], "1.0 2.0 1.0 0.2"),
        ["1.1 0.25 - step", "2.1 0.25 - step", "1.1 0.25 - step", "0.3 0.75 C step =1.5/12/0"],
    ],
}


def play_table(envs, table):
    actions = np.zeros((4, 3), np.float32)
    envs.reset(seed=40)
    for cells in table:
        if isinstance(cells, tuple):
            mask = np.isin(np.arange(4), cells[0])
            obs, infos = envs.reset(options={"reset_mask": mask})
            assert " ".join(f"{row[1]:.0f}.{row[2]:.0f}" for row in obs["proprio"]) == cells[1]
            assert infos["_fresh"].tolist() == mask.tolist() and "worker_restarted" not in infos
            continue
        result = envs.step(actions)
        infos = result[4]
        if "worker_restarted" in infos:
            assert infos["worker_restarted"].dtype == np.bool_
            assert infos["worker_restarted"].tolist()[2:] == [False, False]
            for i, cell in enumerate(cells):  # a reset that was done again may say so, or not
                if cell.split()[3] == "reset":
                    infos["_worker_restarted"][i] = False
        check_cells(result, cells, stub_image)


@pytest.mark.parametrize(
    ("mode", "kind"),
    [(NEXT_STEP, kind) for kind in FAULTS] + [(SAME_STEP, "raise"), (DISABLED, "SIGKILL")],
    ids=str,
)
def test_fault_table(make_vec, once, mode, kind):
    per_env = {**SCRIPTS, 0: {**SCRIPTS[0], "faults": [once(kind, step=2)]}}
    limit = {"step_timeout": HANG_S} if kind == "SIGSTOP" else {}
    envs = make_vec(4, per_env, rich_info=True, autoreset_mode=mode, **limit)
    assert envs.worker_of.tolist() == [0, 0, 1, 1]
    pids, began = envs.worker_pids, time.monotonic()
    with pytest.warns(WorkerRestartWarning) as caught:
        play_table(envs, TABLES[mode])
    assert once.reached() == 1 and len(caught) == 1
    assert time.monotonic() - began >= (HANG_S if limit else 0.0)
    text = str(caught[0].message)
    assert FAULTS[kind] in text, text
    for part in ("orker 0", "0 (task 0", "step"):  # which worker, environments, tasks, command
        assert part in text, text
    assert envs.worker_pids[0] != pids[0] and envs.worker_pids[1] == pids[1]
    assert not alive(pids[0])


def test_the_first_answer_has_the_time_of_a_start(make_vec, once):
    """Drawing code is compiled with the first image, by all workers at once."""
    envs = make_vec(4, {0: {"faults": [once("pause", "reset")]}}, step_timeout=PAUSE_S / 2)
    expected = follower(4, 5, NEXT_STEP)
    with warnings.catch_warnings(action="error", category=WorkerRestartWarning):
        result = envs.reset(seed=5)
    assert once.reached() == 1
    expected.check_reset(plain_reset(result))
    advance(envs, expected, 10)


@pytest.mark.parametrize(("kind", "step"), [("hang", None), ("pause", 1)])
def test_a_worker_that_hangs_is_killed_before_and_after_its_first_answer(
    make_vec, once, kind, step
):
    fault = once(kind, "reset") if step is None else once(kind, step=step)
    limits = {"start_timeout": HANG_S, "step_timeout": PAUSE_S / 2}
    limit = limits["start_timeout" if step is None else "step_timeout"]
    envs = make_vec(2, {0: {"faults": [fault]}}, **limits)
    with pytest.warns(WorkerRestartWarning, match=f"no progress for {limit:g} s"):
        envs.reset(seed=0)
        envs.step(np.zeros((2, 3), np.float32))
    assert once.reached() == 1


@pytest.mark.parametrize("mate_is_done", [False, True])
@by_mode
def test_a_killed_step_shows_nothing_of_itself(make_vec, tmp_path, mode, mate_is_done):
    """Killed from outside in the middle of a step; envs of the worker that are done lose it, too.

    With ``mate_is_done`` env 0 has written its new observation when env 1 is killed.
    """
    gate = Gate(str(tmp_path / "gate"), step=3)
    script = {"script": [(4, LIMIT)]}
    per_env = {1 if mate_is_done else 0: {"gates": [gate]}}
    envs = make_vec(4, per_env, autoreset_mode=mode, **script)
    expected = begin(envs, 10, **script)
    advance(envs, expected, 2)
    envs.step_async(expected.actions())
    wait_until((tmp_path / "gate.entered").exists, "the step")
    os.kill(envs.worker_pids[0], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning, match="SIGKILL"):
        result = envs.step_wait()
    expected.check_step(result, lost=[0, 1])
    (tmp_path / "gate").touch()
    advance(envs, expected, 8)
    assert expected.lost == [1, 1, 0, 0]


# Asynchronous use


@by_autoreset
def test_death_while_some_envs_of_the_worker_wait(make_vec, tmp_path, mode):
    """Env 0 is done and received when env 1 dies with their worker: env 0 loses its next step."""
    gate = Gate(str(tmp_path / "gate"), step=2)
    script = {"script": [(6, LIMIT)]}
    envs = make_vec(4, {1: {"gates": [gate]}}, autoreset_mode=mode, **script)
    expected = begin(envs, 0, **script)
    advance(envs, expected, 1)
    envs.send(expected.actions([0, 2, 3]), [0, 2, 3])
    envs.send(expected.actions([1]), [1])
    result = envs.recv(min_envs=3)
    expected.check_step(result, ids=[0, 2, 3])
    wait_until((tmp_path / "gate.entered").exists, "the step")
    os.kill(envs.worker_pids[0], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning):
        expected.check_step(envs.recv(), ids=[1], lost=[1])
    envs.send(expected.actions([2]), [2])
    expected.check_step(envs.recv(), ids=[2])
    envs.send(expected.actions([0, 3]), [0, 3])
    expected.check_step(envs.recv(), ids=[0, 3], lost=[0])
    (tmp_path / "gate").touch()
    advance(envs, expected, 10)


def test_a_hung_worker_is_noticed_while_others_are_busy(make_vec, once):
    """Whoever is always served by others must still learn of it."""
    script = {"script": [(10**6, LIMIT)]}
    envs = make_vec(2, {1: {"faults": [once("hang", step=2)]}}, step_timeout=HANG_S, **script)
    envs.reset(seed=0)
    envs.step(np.zeros((2, 3), np.float32))
    envs.send(np.zeros((2, 3), np.float32), [0, 1])
    began, found = time.monotonic(), None
    with pytest.warns(WorkerRestartWarning, match="no progress"):
        while found is None:
            assert time.monotonic() - began < 10 * HANG_S, "the hung worker was never noticed"
            *_, truncated, infos = envs.recv(min_envs=1)
            ids = infos["env_id"].tolist()
            if 1 in ids:
                found = truncated[ids.index(1)], info_row(infos, ids.index(1))
            if 0 in ids:
                envs.send(np.zeros((1, 3), np.float32), [0])
                time.sleep(0.03)  # there is always an answer to read at once
    assert found[0] and found[1]["worker_restarted"]


def test_death_in_a_call(make_vec):
    envs = make_vec(4, script=[(6, LIMIT)])
    expected = begin(envs, 0, script=[(6, LIMIT)])
    advance(envs, expected, 1)
    with warnings.catch_warnings(action="ignore", category=WorkerRestartWarning):
        with pytest.raises(WorkerError, match="SIGKILL"):
            envs.call("die")
        expected.check_step(envs.step(expected.actions()), lost=range(4))
    assert envs.call("add", 1) == (1, 101, 201, 301)
    advance(envs, expected, 8)


@by_autoreset
def test_death_right_after_set_state(make_vec, mode):
    """The lost step is one of the restored episode: its infos are, too, not of the one before."""
    envs = make_vec(4, script=[(6, LIMIT)], autoreset_mode=mode)
    envs.reset(seed=0)
    for _ in range(2):
        envs.step(np.zeros((4, 3), np.float32))
    states = envs.get_state([0, 1])
    envs.step(np.zeros((4, 3), np.float32))
    envs.set_state(states, [2, 3])
    os.kill(envs.worker_pids[1], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning, match=r"task 0, .*task 1, "):
        obs, _, _, truncated, infos = envs.step(np.zeros((4, 3), np.float32))
    assert truncated.tolist() == [False, False, True, True]
    for i, task in ((2, 0), (3, 1)):
        info = info_row(infos, i)
        last = info["final_obs"] if mode == SAME_STEP else {k: v[i] for k, v in obs.items()}
        assert last["proprio"][:3].tolist() == [task, 0, 2] and last["task_id"] == task
        if mode == SAME_STEP:
            # The next episode is the one that follows the restored one.
            assert obs["proprio"][i][:3].tolist() == [task, 1, 0]
            assert info["instruction"] == f"do task {task + 1}"
            info = info["final_info"]
        assert (info["task_id"], info["instruction"]) == (task, f"do task {task}")
        assert info["elapsed_steps"] == 8


@by_autoreset
def test_states_of_a_worker_that_has_died_are_those_of_the_next_episodes(make_vec, mode):
    """So a checkpoint can be written at any moment, and what goes on from it begins them."""
    envs = make_vec(4, script=[(6, LIMIT)], autoreset_mode=mode)
    envs.reset(seed=0)
    envs.step(np.zeros((4, 3), np.float32))
    os.kill(envs.worker_pids[1], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning):
        states = envs.get_state()
    assert [state.env is None for state in states] == [False, False, True, True]
    # The run itself goes on as it would have: the lost step is told.
    assert envs.step(np.zeros((4, 3), np.float32))[3].tolist() == [False, False, True, True]
    os.kill(envs.worker_pids[0], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning):
        obs = envs.set_state(states)
    assert obs["proprio"][:, 1:3].tolist() == [[0, 1], [0, 1], [1, 0], [1, 0]]
    assert not envs.step(np.zeros((4, 3), np.float32))[3].any()
    assert envs.get_state()[2].next_episode == 2
