"""Faults in resets and at the start; when a restart is not wanted, or not any more."""

import warnings
from functools import partial

import numpy as np
import pytest
from stub_envs import LIMIT, Fault, StubEnv, Unseekable, stub_factory
from vector_reference import (
    CRASHES,
    HANG_S,
    NEXT_STEP,
    SAME_STEP,
    advance,
    begin,
    by_mode,
    follower,
    plain_reset,
)

from vla_gym.errors import UnknownTaskError, WorkerError, WorkerRestartWarning
from vla_gym.vector import LiberoVectorEnv

pytestmark = pytest.mark.usefixtures("nothing_stays")


# Faults in resets and at the start


@by_mode
def test_a_fault_in_the_reset_between_episodes(make_vec, once, mode):
    """NEXT_STEP and DISABLED: the reset is done again. SAME_STEP: the step is lost."""
    script = {"script": [(2, LIMIT)]}
    per_env = {0: {"faults": [once("SIGKILL", "reset", episode=1)]}, 1: {"script": [(7, LIMIT)]}}
    envs = make_vec(4, per_env, autoreset_mode=mode, **script)
    expected = begin(envs, 5, per_env, **script)
    advance(envs, expected, 1)
    with pytest.warns(WorkerRestartWarning, match="SIGKILL"):
        if mode == SAME_STEP:
            expected.check_step(envs.step(expected.actions()), lost=[0, 1])
        elif mode == NEXT_STEP:
            advance(envs, expected, 1)
            # Env 1, which was stepping, loses its episode; env 0 is reset again.
            expected.check_step(envs.step(expected.actions()), lost=[0, 1])
        else:
            advance(envs, expected, 1)
            mask = np.array(expected.due)
            assert mask.tolist() == [True, False, True, True]
            result = envs.reset(options={"reset_mask": mask})
            expected.check_masked_reset(plain_reset(result), mask)
            # Env 1 was not part of it, but its episode is gone.
            expected.check_step(envs.step(expected.actions()), lost=[1])
    assert once.reached() == 1
    assert expected.episode[0] == 1
    advance(envs, expected, 10)


@by_mode
def test_options_hold_in_a_reset_that_is_done_again(make_vec, once, mode):
    envs = make_vec(2, {0: {"faults": [once("SIGKILL", "reset")]}}, autoreset_mode=mode)
    options = {"task_id": 4, "init_state_id": 3}
    with pytest.warns(WorkerRestartWarning):
        obs, infos = envs.reset(seed=0, options=options)
    assert obs["task_id"].tolist() == [4, 4] and infos["init_state_id"].tolist() == [3, 3]
    assert obs["proprio"][:, :3].tolist() == [[0, 0, 0], [1, 0, 0]]


def test_an_unseeded_env_goes_on_with_its_own_seed(make_vec, once):
    envs = make_vec(2, {0: {"faults": [once("SIGKILL", step=1)]}}, script=[(3, LIMIT)])
    envs.reset()
    seeds = envs.get_attr("_seed_value")
    with pytest.warns(WorkerRestartWarning):
        envs.step(np.zeros((2, 3), np.float32))
    envs.step(np.zeros((2, 3), np.float32))
    assert envs.get_attr("_seed_value") == seeds and envs.get_attr("episode")[0] == 1


def test_an_env_that_cannot_seek_is_seeded_again(make_vec, tmp_path):
    """Not with the next episode of its old seed, but the same each time."""
    played = []
    for run in range(2):
        fault = Fault("SIGKILL", episode=1, flag=str(tmp_path / f"run{run}"))
        kwargs = {0: {"faults": [fault]}, 1: {}}
        envs = make_vec(2, lambda i, own=kwargs: Unseekable(i, script=[(2, LIMIT)], **own[i]))
        seen = [envs.reset(seed=5)[0]["image"]]
        with pytest.warns(WorkerRestartWarning):
            for _ in range(8):
                seen.append(envs.step(np.zeros((2, 3), np.float32))[0]["image"])
        assert envs.get_attr("_seed_value")[0] != 5
        played.append(np.stack(seen))
    np.testing.assert_array_equal(played[0], played[1])


@pytest.mark.parametrize(
    ("kind", "at", "index"),
    [("SIGKILL", "init", 0), ("abort", "init", 3), ("SIGSTOP", "init", 3)]
    + [(kind, "reset", 3) for kind in ("SIGKILL", "abort", "raise")],
)
def test_a_fault_at_the_start_or_in_the_first_reset_is_only_a_warning(
    make_vec, once, kind, at, index
):
    limit = {"start_timeout": HANG_S} if at == "init" else {}
    with pytest.warns(WorkerRestartWarning) as caught:
        envs = make_vec(4, {index: {"faults": [once(kind, at)]}}, **limit)
        expected = follower(4, 5, NEXT_STEP)
        result = envs.reset(seed=5)
    assert once.reached() == 1
    assert [item.category for item in caught] == [WorkerRestartWarning], list(map(str, caught))
    assert at == "init" or CRASHES[kind] in str(caught[0].message)
    expected.check_reset(plain_reset(result))
    advance(envs, expected, 10)


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (stub_factory(faults=[Fault("raise", "init")]), "ZeroDivisionError: stub fault in init"),
        (stub_factory(faults=[Fault("abort", "init")]), "SIGABRT"),
        (stub_factory({3: {"faults": [Fault("raise", "init")]}}), "stub fault in init"),
        (stub_factory({3: {"faults": [Fault("SIGKILL", "init")]}}), "SIGKILL"),
    ],
)
def test_an_environment_that_cannot_be_built_is_one_clear_error(factory, text):
    with warnings.catch_warnings(action="ignore", category=WorkerRestartWarning):
        with pytest.raises(WorkerError, match=text):
            envs = LiberoVectorEnv(4, env_factory=factory, workers=2, max_restarts=1)
            envs.reset(seed=0)


def test_errors_of_the_package_in_a_constructor_come_unchanged():
    def factory(index):
        if index == 1:
            raise UnknownTaskError("no such task")
        return StubEnv(index)

    with pytest.raises(UnknownTaskError, match="no such task"):
        envs = LiberoVectorEnv(2, env_factory=factory, workers=2)
        envs.reset(seed=0)


# When a restart is not wanted, or not any more


@pytest.mark.parametrize("kind", ["SIGKILL", "raise"])
def test_no_restarts(make_vec, once, kind):
    faults = {0: {"faults": [once(kind, step=2)]}}
    envs = make_vec(4, faults, max_restarts=0, script=[(3, LIMIT)])
    expected = begin(envs, 0, script=[(3, LIMIT)])
    with warnings.catch_warnings(action="error"):
        with pytest.raises(WorkerError, match=CRASHES[kind]):
            for _ in range(10):
                envs.step(expected.actions())
    for use in (partial(envs.step, expected.actions()), envs.reset, envs.get_state):
        with pytest.raises(WorkerError, match=CRASHES[kind]):
            use()
    envs.close()


def test_a_permanent_failure_ends_in_one_clear_error(make_vec):
    envs = make_vec(
        4, {0: {"faults": [Fault("raise", episode=e, step=2) for e in range(9)]}},
        max_restarts=2, script=[(9, LIMIT)],
    )  # fmt: skip
    envs.reset(seed=0)
    with pytest.warns(WorkerRestartWarning) as caught:
        with pytest.raises(WorkerError, match="stub fault in step") as raised:
            for _ in range(30):
                envs.step(np.zeros((4, 3), np.float32))
    assert [item.category for item in caught] == [WorkerRestartWarning] * 2
    assert "max_restarts" in str(raised.value)
    with pytest.raises(WorkerError):
        envs.step(np.zeros((4, 3), np.float32))


def test_failures_between_ended_episodes_never_use_up_the_budget(make_vec, once):
    faults = [once("SIGKILL", episode=e, step=2) for e in (0, 2, 4, 6)]
    script = {"script": [(3, LIMIT)]}
    envs = make_vec(1, {0: {"faults": faults}}, workers=1, max_restarts=1, **script)
    envs.reset(seed=0)
    lost = 0
    with pytest.warns(WorkerRestartWarning):
        for _ in range(30):
            *_, infos = envs.step(np.zeros((1, 3), np.float32))
            lost += "worker_restarted" in infos
    assert lost == once.reached() == 4


def test_a_reset_that_always_fails_ends_in_one_clear_error(make_vec):
    envs = make_vec(2, {1: {"faults": [Fault("SIGKILL", "reset", episode=1)]}}, max_restarts=2)
    envs.reset(seed=0)
    with warnings.catch_warnings(action="ignore", category=WorkerRestartWarning):
        with pytest.raises(WorkerError, match="SIGKILL"):
            for _ in range(30):
                envs.step(np.zeros((2, 3), np.float32))
