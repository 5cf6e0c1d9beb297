"""The memory of many environments against a loop over one, in every mode and after every mishap."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
from functools import partial
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import picture_env
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from picture_env import PictureEnv, Pictures
from vector_reference import (
    DISABLED,
    NEXT_STEP,
    SAME_STEP,
    Follower,
    Reference,
    advance,
    assert_same,
    by_autoreset,
    by_mode,
    follow,
    info_row,
    play_alike,
    rows,
)
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


class ByHand(gym.Wrapper):
    """What a model makes of one environment's episodes, one row at a time."""

    def __init__(self, env: Pictures) -> None:
        super().__init__(env)
        self.model = toy_model()

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self.env.reset(**kwargs)
        nothing = np.zeros((CHUNK_LEN, 7), np.float32)
        return self._see(self.model.initial_state(1), obs, info, nothing), info

    def _see(
        self, state: torch.Tensor, obs: dict[str, Any], info: dict[str, Any], action: np.ndarray
    ) -> dict[str, Any]:
        """Take in an observation; return it with the memory."""
        views = {name: obs[name][None] for name in ("agentview", "wrist")}
        proprio, chunk = obs["proprio"][None], torch.from_numpy(action.reshape(1, -1))
        features = self.model.features(views, [info["instruction"]], proprio)
        with torch.no_grad():
            self.state = self.model.update(state, features, torch.from_numpy(proprio), chunk)
        self.tokens = self.model.tokens(views["wrist"])
        here = tuple(np.floor(obs["proprio"][:3] / terms.CELL))
        self.is_new = info["t"] > 0 and here not in self.places
        self.places = [*(self.places if info["t"] else ()), here]
        return {**obs, WORLD_MEMORY: self.state[0].numpy()}

    def step(self, action: np.ndarray) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        executed = np.clip(action, -1.0, 1.0)
        executed[info.get("executed_steps", CHUNK_LEN) :] = 0.0
        before, tokens = self.state, self.tokens
        obs = self._see(before, obs, info, executed)
        with torch.no_grad():
            logits = self.model.logits(before, tokens, torch.from_numpy(executed.reshape(1, -1)))
        found = {
            "task": reward,
            "memory_divergence": float(terms.memory_divergence(before, self.state)),
            "uncertainty": float(terms.uncertainty(logits)),
            "prediction_error": float(terms.prediction_error(logits, self.tokens)),
            "coverage": float(self.is_new),
        }
        paid = sum(WEIGHTS[name] * value for name, value in found.items())
        return obs, paid, terminated, truncated, info | {"reward_terms": found}


def played(env: int, episode: int, step: int) -> np.ndarray:
    """What is played in an episode's step; some of it is beyond the bounds."""
    rng = np.random.default_rng([env, episode, step])
    return rng.normal(size=(CHUNK_LEN, 7)).astype(np.float32)


def by_hand(num_envs: int, seed: int, mode: AutoresetMode, env: type[Pictures] = Pictures) -> Any:
    """What each row must be, to the rounding of a batch's rows."""
    references = [Reference(ByHand(env()), seed + i, partial(played, i)) for i in range(num_envs)]
    return Follower(references, mode, dict.fromkeys((WORLD_MEMORY, "reward_terms", "reward"), 1e-5))


@by_mode
@pytest.mark.parametrize(("workers", "env"), [(2, Pictures), (0, Untold)])
def test_rows_equal_a_loop_over_single_environments(mode, workers, env):
    envs = make(mode, workers=workers, env=env)
    follow(envs, by_hand(3, 5, mode, env), 5, episodes=3, stagger=[1])
    assert envs.reset(seed=5)[0] in envs.observation_space
    envs.close()


@by_autoreset
def test_gymnasiums_own_vector_environment(mode):
    ours, envs = make(mode, rewards=None), make(mode, workers=None, rewards=None)
    assert not hasattr(envs, "send") and not hasattr(envs, "get_state")
    for _, rewards, terminations, _, infos in play_alike(ours, envs, 5, steps=12):
        np.testing.assert_array_equal(rewards, terminations)  # the task's, of successes
        assert "reward_terms" not in infos


@by_autoreset
def test_rows_out_of_step(mode):
    envs, expected = make(mode, 4, workers=2), by_hand(4, 9, mode)
    envs.reset_send(seed=9)
    expected.check_step(envs.recv(timeout=30), ids=range(4), reset=range(4))
    envs.send(expected.actions(), np.arange(4))
    rng = np.random.default_rng(0)
    for _ in range(30):
        result = envs.recv(int(rng.integers(1, 4)), timeout=30)
        ids = result[4]["env_id"].tolist()
        expected.check_step(result, ids=ids)
        if rng.random() < 0.2:  # one of them is begun anew, whatever it was doing
            envs.reset_send(ids[:1])
            expected.check_step(envs.recv(env_ids=ids[:1], timeout=30), ids=ids[:1], reset=ids[:1])
        envs.send(expected.actions(ids), ids)
    assert sum(expected.finished) > 6
    envs.close()


@pytest.mark.parametrize(
    ("mode", "env"), [(NEXT_STEP, Untold), (SAME_STEP, Pictures), (DISABLED, Pictures)]
)
def test_a_killed_worker_leaves_the_memory_as_it_was(mode, env):
    envs, expected = make(mode, 2, workers=2, env=env), by_hand(2, 5, mode, env)
    expected.check_reset(envs.reset(seed=5))
    while not expected.count[1] or any(expected.due):
        advance(envs, expected)
    kept = envs.memory.rows(np.array([1]))[0]
    os.kill(envs.worker_pids[1], signal.SIGKILL)
    with pytest.warns(WorkerRestartWarning):
        result = envs.step(expected.actions())
    expected.check_step(result, lost=[1])
    final = result[4]["final_obs"][1] if mode == SAME_STEP else rows(result[0], 1)
    np.testing.assert_array_equal(final[WORLD_MEMORY], kept)
    for infos in (result[4], result[4].get("final_info", {})):
        assert "reward_terms" not in info_row(infos, 1)
    advance(envs, expected, 4)
    envs.close()


@by_mode
def test_states_go_on_elsewhere(mode):
    """Saved in the midst, pickled, and restored to other places of another vector environment."""
    envs, other, expected = make(mode), make(mode, 2), by_hand(3, 5, mode)
    expected.check_reset(envs.reset(seed=5))
    other.reset(seed=77)
    other.step(np.zeros((2, CHUNK_LEN, 7), np.float32))
    for _ in range(20):
        expected.check_step(envs.step(expected.actions()))
        if expected.due[2] or (mode == DISABLED and any(expected.due)):
            break
    assert mode != NEXT_STEP or expected.due[2]
    states = pickle.loads(pickle.dumps(envs.get_state([2, 0])))
    obs = other.set_state(states, [1, 0])
    moved = Follower([expected.references[i] for i in (0, 2)], mode, expected.loose)
    for name in ("episode", "count", "due", "last"):
        getattr(moved, name)[:] = [getattr(expected, name)[i] for i in (0, 2)]
    for i in range(2):
        assert_same(rows(obs, i), moved.last[i], f"env {i}", moved.loose)
    advance(other, moved, 8)
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
