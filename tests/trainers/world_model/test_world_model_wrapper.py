"""The memory of many environments against a loop over one, in every mode and after every mishap."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import picture_env
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from picture_env import PictureEnv, Pictures
from vector_reference import DISABLED, NEXT_STEP, SAME_STEP, by_mode
from world_model_toys import CHUNK_LEN, TOKENIZER, toy_model

from vla_gym.errors import ConfigError, WorkerRestartWarning
from vla_gym.vector import LiberoVectorEnv
from vla_gym_trainers.world_model import rewards as terms
from vla_gym_trainers.world_model.memory import WorldMemory
from vla_gym_trainers.world_model.model import GRUWorldModel
from vla_gym_trainers.world_model.protocol import WORLD_MEMORY
from vla_gym_trainers.world_model.wrapper import WorldModelObservation

cloudpickle.register_pickle_by_value(picture_env)
pytestmark = pytest.mark.usefixtures("warm_server")
WEIGHTS = {
    "task": 1.0,
    "memory_divergence": 0.5,
    "uncertainty": 0.25,
    "prediction_error": 2.0,
    "coverage": 0.125,
}


class Untold(Pictures):
    """Tells nothing of how many control steps were executed: all of them were."""

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        del info["executed_steps"]
        return obs, info

    def step(self, action: np.ndarray) -> Any:
        *result, info = super().step(action)
        del info["executed_steps"]
        return *result, info


def make(
    mode: AutoresetMode,
    num_envs: int = 3,
    workers: int | None = 0,
    rewards: dict[str, float] | None = WEIGHTS,
    model: GRUWorldModel | None = None,
    env: type[Pictures] = Pictures,
) -> Any:
    envs: Any = SyncVectorEnv([env] * num_envs, autoreset_mode=mode)
    if workers is not None:
        envs = LiberoVectorEnv(
            num_envs,
            env_factory=lambda _: env(),
            workers=workers,
            autoreset_mode=mode,
            copy=False,
        )
    return WorldModelObservation(envs, model or toy_model(), rewards)


def actions_of(env: int, step: int) -> np.ndarray:
    """What is played in an episode's step; some of it is beyond the bounds."""
    return np.random.default_rng([env, step]).normal(size=(CHUNK_LEN, 7)).astype(np.float32)


class ByHand:
    """One environment, its episode and what a model makes of it, one row at a time."""

    def __init__(self, env: int, seed: int, kind: type[Pictures] = Pictures) -> None:
        self.env, self.model, self.index = kind(), toy_model(), env
        self.obs, self.info = self.env.reset(seed=seed)
        self._begin()

    def _see(self, state: torch.Tensor, action: np.ndarray) -> torch.Tensor:
        self.views = {name: self.obs[name][None] for name in ("agentview", "wrist")}
        proprio = self.obs["proprio"][None]
        features = self.model.features(self.views, [self.info["instruction"]], proprio)
        flat = torch.from_numpy(action.reshape(1, -1))
        with torch.no_grad():
            return self.model.update(state, features, torch.from_numpy(proprio), flat)

    def _begin(self) -> None:
        self.count, self.ended = 0, False
        nothing = np.zeros((CHUNK_LEN, 7), np.float32)
        self.state = self._see(self.model.initial_state(1), nothing)
        self.tokens = self.model.tokens(self.views["wrist"])
        self.places = [self._place()]

    def _place(self) -> tuple[float, ...]:
        return tuple(np.floor(self.obs["proprio"][:3] / terms.CELL))

    def reset(self) -> None:
        self.obs, self.info = self.env.reset()
        self._begin()

    def step(self) -> tuple[float, bool, bool, dict[str, float]]:
        """Play on; return the task's reward, both flags and the terms."""
        action = np.clip(actions_of(self.index, self.count), -1.0, 1.0)
        self.obs, reward, terminated, truncated, self.info = self.env.step(action)
        self.count, self.ended = self.count + 1, terminated or truncated
        action[self.info.get("executed_steps", CHUNK_LEN) :] = 0.0
        before, tokens = self.state, self.tokens
        self.state = self._see(before, action)
        self.tokens = self.model.tokens(self.views["wrist"])
        with torch.no_grad():
            logits = self.model.logits(before, tokens, torch.from_numpy(action.reshape(1, -1)))
        found = {
            "task": reward,
            "memory_divergence": float(terms.memory_divergence(before, self.state)),
            "uncertainty": float(terms.uncertainty(logits)),
            "prediction_error": float(terms.prediction_error(logits, self.tokens)),
            "coverage": float(self._place() not in self.places),
        }
        self.places.append(self._place())
        return reward, terminated, truncated, found

    def check(self, obs: dict[str, Any], row: int | None = None) -> None:
        """Check an observation, or a row of one."""
        mine = {**self.obs, WORLD_MEMORY: self.state[0].numpy()}
        assert obs.keys() == mine.keys()
        for key, value in mine.items():
            found = obs[key] if row is None else obs[key][row]
            tolerance = 1e-5 if key == WORLD_MEMORY else 0.0
            np.testing.assert_allclose(found, value, rtol=0, atol=tolerance, err_msg=key)


def reset_ended(envs: Any, singles: list[ByHand]) -> dict[str, np.ndarray]:
    """Reset and check what has ended, which DISABLED leaves to the caller."""
    obs, _ = envs.reset(options={"reset_mask": np.array([one.ended for one in singles])})
    for i, one in enumerate(singles):
        if one.ended:
            one.reset()
        one.check(obs, i)
    return obs


def chunks(singles: list[ByHand]) -> np.ndarray:
    return np.stack([actions_of(one.index, one.count) for one in singles])


def row_of(infos: dict[str, Any], i: int) -> dict[str, float] | None:
    if "reward_terms" not in infos or not infos["_reward_terms"][i]:
        return None
    shown = infos["reward_terms"]
    assert all(shown[f"_{name}"][i] for name in WEIGHTS)
    return {name: shown[name][i] for name in WEIGHTS}


def follow(singles: list[ByHand], result: Any, mode: AutoresetMode, ids: Any = None) -> int:
    """Check a step's rows against single environments; return how many episodes ended."""
    obs, rewards, terminations, truncations, infos = result
    ids = range(len(singles)) if ids is None else ids
    ended = 0
    for row, i in enumerate(ids):
        one = singles[i]
        if one.ended and mode == NEXT_STEP:
            one.reset()
            assert rewards[row] == 0.0 and row_of(infos, row) is None
            assert not (terminations[row] or truncations[row])
            one.check(obs, row)
            continue
        _, terminated, truncated, found = one.step()
        assert (terminations[row], truncations[row]) == (terminated, truncated)
        expected = sum(WEIGHTS[name] * value for name, value in found.items())
        assert rewards[row] == pytest.approx(expected, abs=1e-5)
        shown = infos
        if one.ended:
            ended += 1
            assert infos["episode_stats"]["success"][row] == terminated
            assert infos["episode_stats"]["return"][row] == float(terminated), "the task's"
        if one.ended and mode == SAME_STEP:
            one.check(infos["final_obs"][row])
            assert row_of(infos, row) is None
            shown = infos["final_info"]
        assert row_of(shown, row) == pytest.approx(found, abs=1e-5)
        if one.ended and mode == SAME_STEP:
            one.reset()
        one.check(obs, row)
    return ended


@by_mode
@pytest.mark.parametrize(("workers", "env"), [(2, Pictures), (0, Untold)])
def test_rows_equal_a_loop_over_single_environments(mode, workers, env):
    envs = make(mode, workers=workers, env=env)
    singles = [ByHand(i, 5 + i, env) for i in range(3)]
    obs, _ = envs.reset(seed=5)
    assert obs in envs.observation_space
    for i, one in enumerate(singles):
        one.check(obs, i)
    ended = 0
    for _ in range(20):
        if mode == DISABLED and any(one.ended for one in singles):
            reset_ended(envs, singles)
        ended += follow(singles, envs.step(chunks(singles)), mode)
    assert ended > 6
    envs.close()


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_gymnasiums_own_vector_environment(mode):
    envs, singles = make(mode, workers=None, rewards=None), [ByHand(i, 5 + i) for i in range(3)]
    envs.reset(seed=5)
    assert not hasattr(envs, "send") and not hasattr(envs, "get_state")
    for _ in range(12):
        obs, rewards, *_, infos = envs.step(chunks(singles))
        assert "reward_terms" not in infos
        for i, one in enumerate(singles):
            if one.ended:
                one.reset()
                one.check(obs, i)
                continue
            reward = one.step()[0]
            assert rewards[i] == reward
            if one.ended and mode == SAME_STEP:
                one.check(infos["final_obs"][i])
                one.reset()
            one.check(obs, i)


@pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP])
def test_rows_out_of_step(mode):
    envs, singles = make(mode, 4, workers=2), [ByHand(i, 9 + i) for i in range(4)]
    envs.reset_send(seed=9)
    obs, *_, infos = envs.recv(timeout=30)
    assert infos["env_id"].tolist() == [0, 1, 2, 3]
    for i, one in enumerate(singles):
        one.check(obs, i)
    envs.send(chunks(singles), np.arange(4))
    rng, ended = np.random.default_rng(0), 0
    for _ in range(30):
        result = envs.recv(int(rng.integers(1, 4)), timeout=30)
        ids = result[4]["env_id"]
        ended += follow(singles, result, mode, ids.tolist())
        if rng.random() < 0.2:  # one of them is begun anew, whatever it was doing
            i = int(ids[0])
            envs.reset_send([i])
            obs, rewards, *_, infos = envs.recv(env_ids=[i], timeout=30)
            singles[i].reset()
            singles[i].check(obs, 0)
            assert rewards.tolist() == [0.0] and row_of(infos, 0) is None
        envs.send(chunks([singles[i] for i in ids]), ids)
    assert ended > 6
    envs.close()


@pytest.mark.parametrize(
    ("mode", "env"), [(NEXT_STEP, Untold), (SAME_STEP, Pictures), (DISABLED, Pictures)]
)
def test_a_killed_worker_leaves_the_memory_as_it_was(mode, env):
    envs, singles = make(mode, 2, workers=2, env=env), [ByHand(i, 5 + i, env) for i in range(2)]
    last, _ = envs.reset(seed=5)
    while not any(one.count for one in singles) or any(one.ended for one in singles):
        if mode == DISABLED and any(one.ended for one in singles):
            last = reset_ended(envs, singles)
            continue
        result = envs.step(chunks(singles))
        follow(singles, result, mode)
        last = result[0]
    last = {key: value.copy() for key, value in last.items()}
    os.kill(envs.worker_pids[1], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning):
        result = envs.step(chunks(singles))
    obs, rewards, _, truncations, infos = result
    assert truncations[1] and rewards[1] == 0.0 and infos["worker_restarted"].tolist() == [0, 1]
    assert row_of(infos, 1) is None and row_of(infos.get("final_info", {}), 1) is None
    final = obs
    if mode == SAME_STEP:
        final = {key: np.stack([value] * 2) for key, value in infos["final_obs"][1].items()}
    for key, value in last.items():
        np.testing.assert_array_equal(final[key][1], value[1], err_msg=key)
    singles[1].reset()
    singles[1].ended = False
    if mode == SAME_STEP:
        singles[1].check(obs, 1)
    if mode == DISABLED:
        obs, _ = envs.reset(options={"reset_mask": np.array([False, True])})
        singles[1].check(obs, 1)
    if mode == NEXT_STEP:
        obs, rewards, *_, infos = envs.step(np.zeros((2, CHUNK_LEN, 7), np.float32))
        singles[1].check(obs, 1)
        assert rewards[1] == 0.0 and row_of(infos, 1) is None
    envs.close()


@by_mode
def test_states_go_on_elsewhere(mode):
    """Saved in the midst, pickled, and restored to other places of another vector environment."""
    envs, other = make(mode), make(mode, 2)
    singles = [ByHand(i, 5 + i) for i in range(3)]
    envs.reset(seed=5)
    other.reset(seed=77)
    other.step(np.zeros((2, CHUNK_LEN, 7), np.float32))
    for _ in range(20):
        follow(singles, envs.step(chunks(singles)), mode)
        if any(one.ended for one in singles if mode == DISABLED or one is singles[2]):
            break
    assert mode != NEXT_STEP or singles[2].ended
    states = pickle.loads(pickle.dumps(envs.get_state([2, 0])))
    obs = other.set_state(states, [1, 0])
    moved = [singles[0], singles[2]]
    for row, one in enumerate(moved):
        one.check(obs, row)
    for _ in range(8):
        if mode == DISABLED and any(one.ended for one in moved):
            reset_ended(other, moved)
        follow(moved, other.step(chunks(moved)), mode)
    with pytest.raises(ConfigError, match="a state of WorldModelObservation, got"):
        envs.set_state([state.env for state in states], [0, 1])
    bigger = make(mode, model=toy_model(memory_hidden=16))
    bigger.reset(seed=0)
    with pytest.raises(ConfigError, match="memory of 16 numbers"):
        bigger.set_state(states, [0, 1])
    finer = make(mode, model=toy_model(tokenizer=dataclasses.replace(TOKENIZER, grid_size=1)))
    finer.reset(seed=0)
    with pytest.raises(ConfigError, match="and 1 tokens"):
        finer.set_state(states, [0, 1])


def test_one_forward_pass_a_step_and_none_of_what_is_not_asked_for():
    model = toy_model()
    envs = make(SAME_STEP, model=model, rewards={"task": 1.0, "memory_divergence": 1.0})
    envs.reset(seed=5)
    expected, batches = [3], model.vla.batches
    calls: list[int] = []
    model.logits = lambda *_: calls.append(1)  # type: ignore[method-assign]
    for _ in range(8):
        *_, terminations, truncations, infos = envs.step(envs.action_space.sample())
        expected.append(3 + int((terminations | truncations).sum()))
    assert batches == expected and max(expected) > 3 and not calls
    model.vla.batches.clear()
    envs.reset(options={"reset_mask": np.array([False, True, True])})
    assert model.vla.batches == [2]


def test_nothing_that_was_returned_changes():
    envs = make(SAME_STEP)
    first, _ = envs.reset(seed=1)
    kept = first[WORLD_MEMORY].copy()
    first[WORLD_MEMORY][:] = 9.0
    second, *_ = envs.step(np.zeros((3, CHUNK_LEN, 7), np.float32))
    assert not np.shares_memory(first[WORLD_MEMORY], second[WORLD_MEMORY])
    again, _ = make(SAME_STEP).reset(seed=1)
    np.testing.assert_array_equal(again[WORLD_MEMORY], kept)


class Silent(Pictures):
    def _info(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (partial(PictureEnv, chunk_len=4), r"got \(4, 7\): make .* chunk_len=2"),
        (partial(PictureEnv, 8), "image_size=4"),
        (Silent, "instruction"),
    ],
)
def test_bad_input_is_one_clear_error(env, text):
    with pytest.raises(ConfigError, match=text):
        WorldModelObservation(SyncVectorEnv([env]), toy_model()).reset(seed=0)


def test_an_unknown_place_is_not_new():
    memory, nobody = WorldMemory(toy_model(), 1), np.zeros(0, np.int64)
    places = np.array([[0.0] * 3, [np.nan, 0.2, 0.2], [0.01] * 3, [0.2] * 3])
    paid = [memory._visit(nobody, np.array([0]), places[:1])]
    paid += [memory._visit(np.array([0]), nobody, places[[k]]) for k in (1, 2, 3)]
    assert [found.tolist() for found in paid] == [[], [0.0], [0.0], [1.0]]
