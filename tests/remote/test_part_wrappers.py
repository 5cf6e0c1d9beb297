"""Vector wrappers that know of episodes play in parts what they play around one vector env."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from memory_vla import GRUVLA
from on_policy_toys import tiny_vla
from picture_env import Pictures
from stub_envs import stub_factory
from trees import assert_same
from vector_reference import DISABLED, NEXT_STEP, by_autoreset, by_mode
from world_model_toys import toy_model

from vla_gym.errors import ConfigError, WorkerError
from vla_gym.remote.shards import ThreadHosts
from vla_gym.remote.vector_env import RemoteVectorEnv
from vla_gym.vector import LiberoVectorEnv
from vla_gym.wrappers.vector import FrozenVLAObservation, History
from vla_gym.wrappers.vector_base import VectorObservationWrapper
from vla_gym_trainers.world_model.wrapper import WorldModelObservation

N = 4


class OwnInfos(VectorObservationWrapper):
    """Says by itself what a success is, and has a discount of its own."""

    def _convert_reset(self, obs, infos, env_ids):
        del env_ids
        return obs, self._own(infos)

    def _convert_step(self, result):
        return (*result[:4], self._own(result[4]))

    def _own(self, infos):
        success = ~infos["success"] & infos["_success"]
        own = {**infos, "success": success, "discount": infos["discount"] / 2}
        return own | {k: self._own(info) for k, info in infos.items() if k == "final_info"}


class Failing(VectorObservationWrapper):
    """Does not get an answer the second time, nor to states before the tenth time."""

    asked = 0

    def _convert_reset(self, obs, infos, env_ids):
        del env_ids
        return obs, infos

    def _convert_step(self, result):
        self.asked += 1
        if self.asked == 2:
            raise TimeoutError("the VLA does not answer")
        return result

    def set_state(self, states, env_ids=None):
        self.asked += 1
        if self.asked < 10:
            raise WorkerError("the VLA is lost")
        return self.env.set_state(states, env_ids)


def history() -> dict[str, Any]:
    wrapper = partial(History, length=3, frames=("image",))
    return {"env_factory": stub_factory(), "wrapper": wrapper, "parts": 2}


def stateful_vla() -> dict[str, Any]:
    vla = GRUVLA(tiny_vla(), row_by_row=True)
    wrapper = partial(FrozenVLAObservation, vla=vla, rl_token=None)
    return {"env_factory": lambda _: Pictures(size=64), "wrapper": wrapper, "parts": 2}


def world_model() -> dict[str, Any]:
    """One part: the model's forward passes round with the number of rows."""
    weights = {"task": 1.0, "memory_divergence": 0.5, "uncertainty": 0.25, "prediction_error": 2.0}
    wrapper = partial(WorldModelObservation, world_model=toy_model(), rewards=weights)
    return {"env_factory": lambda _: Pictures(), "wrapper": wrapper, "parts": 1}


def stacked() -> dict[str, Any]:
    found = stateful_vla()
    return found | {"wrapper": lambda envs: found["wrapper"](History(envs, 3))}


def own_infos() -> dict[str, Any]:
    return history() | {"wrapper": OwnInfos}


by_wrapper = pytest.mark.parametrize("given", [world_model, stacked])


@pytest.fixture
def make_both():
    """Make the same environments around one vector env and in parts; close them after the test."""
    made: list[Any] = []

    def make(given: Callable[[], dict[str, Any]], mode: Any) -> list[Any]:
        found = given()
        wrapper, parts = found.pop("wrapper"), ThreadHosts(found.pop("parts"))
        found |= {"autoreset_mode": mode, "workers": 0}
        made.append(wrapper(LiberoVectorEnv(N, **found)))
        made.append(RemoteVectorEnv(N, hosts=parts, vector_wrappers=[wrapper], **found))
        return made[-2:]

    yield make
    for envs in made:
        envs.close()


def actions_of(envs: Any, step: int) -> np.ndarray:
    shape = envs.action_space.shape
    return np.random.default_rng(step).uniform(-1, 1, shape).astype(np.float32)


def play(envs: Any, mode: Any, steps: range) -> list[Any]:
    """Step, with resets of environments that are in the midst of an episode."""
    shown, over = [], np.zeros(N, bool)
    for step in steps:
        mask = over & (mode == DISABLED)
        mask[[0, N - 1]] |= step % 4 == 3
        if mask.any():
            shown.append(envs.reset(options={"reset_mask": mask}))
        shown.append(envs.step(actions_of(envs, step)))
        over = shown[-1][2] | shown[-1][3]
    if over.any():
        shown.append(envs.reset(options={"reset_mask": over}))
    return shown


@by_mode
@pytest.mark.parametrize("given", [world_model, stacked, own_infos])
def test_lock_step_with_resets_inside_episodes(make_both, given, mode):
    played = []
    for envs in make_both(given, mode):
        played.append([envs.reset(seed=5), *play(envs, mode, range(14))])
    assert_same(*played)


@by_autoreset
@by_wrapper
def test_send_and_recv_with_resets_inside_episodes(make_both, given, mode):
    played = []
    for envs in make_both(given, mode):
        envs.reset_send(seed=6)
        shown = [envs.recv(timeout=60)]
        for step in range(12):
            for ids in ([1, 2], [0, 3]):
                envs.send(actions_of(envs, step)[ids], ids)
                shown.append(envs.recv(env_ids=ids, timeout=60))
            if step % 4 == 2:
                envs.reset_send([2])
                shown.append(envs.recv(env_ids=[2], timeout=60))
        played.append(shown)
    assert_same(*played)


@by_mode
@by_wrapper
def test_states_go_on_in_any_part(make_both, given, mode):
    """Saved inside episodes and at their ends, pickled, and restored in another order."""
    played = []
    for envs in make_both(given, mode):
        envs.reset(seed=5)
        play(envs, mode, range(3))
        states = pickle.loads(pickle.dumps(envs.get_state([3, 0, 1])))
        play(envs, mode, range(3, 6))
        shown = [envs.set_state(states, [0, 1, 3])]
        played.append([*shown, *play(envs, mode, range(6, 12))])
    assert_same(*played)


@pytest.mark.parametrize("lock_step", [True, False])
def test_a_timeout_inside_a_wrapper_is_no_deadline_of_the_caller(make_both, lock_step):
    local, envs = make_both(lambda: history() | {"wrapper": Failing, "parts": 1}, NEXT_STEP)
    envs.reset(seed=5)
    actions = np.zeros((N, 3), np.float32)
    with pytest.raises(WorkerError, match="TimeoutError: the VLA does not answer"):
        if lock_step:
            envs.step(actions)
        else:
            envs.send(actions, range(N))
            envs.recv(timeout=8)
    assert_same(envs.reset(seed=6), local.reset(seed=6))
    assert_same(envs.step(actions), local.step(actions))


def test_a_wrapper_that_has_lost_its_vla_is_asked_for_states_once(make_both):
    local, envs = make_both(lambda: history() | {"wrapper": Failing}, NEXT_STEP)
    envs.reset(seed=5)
    with pytest.raises(WorkerError, match="the VLA is lost"):
        envs.set_state(envs.get_state())
    assert_same(envs.reset(seed=6), local.reset(seed=6))


@pytest.mark.parametrize("given", [history, stateful_vla])
def test_a_state_of_an_unwrapped_part_is_refused(make_both, given):
    """With the wrapper's own error, and one that was saved with the wrapper goes on."""
    _, envs = make_both(given, NEXT_STEP)
    plain = RemoteVectorEnv(N, hosts=ThreadHosts(1), env_factory=given()["env_factory"], workers=0)
    for each in (envs, plain):
        each.reset(seed=5)
    with pytest.raises(ConfigError, match="a state of History|saved without one"):
        envs.set_state(plain.get_state())
    obs, *_ = envs.step(actions_of(envs, 0))
    assert_same(envs.set_state(envs.get_state()), obs)
    plain.close()


@pytest.mark.parametrize("given", [history, stacked])
def test_a_state_of_a_wrapped_part_is_refused_without_the_wrapper(make_both, given):
    """In parts and around one vector environment; what comes from without one still goes on."""
    wrapped = make_both(given, NEXT_STEP)
    settings = {"env_factory": given()["env_factory"], "workers": 0}
    plain = [RemoteVectorEnv(N, hosts=ThreadHosts(2), **settings), LiberoVectorEnv(N, **settings)]
    for each in (*wrapped, *plain):
        each.reset(seed=5)
    for into in plain:
        for envs in wrapped:
            with pytest.raises(ConfigError, match="saved with a wrapper around the vector env"):
                into.set_state(envs.get_state())
        obs, *_ = into.step(actions_of(into, 0))
        assert_same(into.set_state(into.get_state()), obs)
    for each in plain:
        each.close()
