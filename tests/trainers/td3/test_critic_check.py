"""The offline check of critics: episodes found in a mixed replay, known answers, errors."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy_env import ToyReach

from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers import TD3BC, TD3Config
from vla_gym_trainers.cli import main
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.td3.critic_check import (
    CriticCheckConfig,
    check_critics,
    episode_numbers,
    format_check,
    load_run,
    rows_by_age,
)

Success = Callable[[np.ndarray, np.random.Generator], bool]


def write_run(folder: Path, success: Success, episodes: int = 600, size: int = 1000) -> Path:
    """Write a checkpoint whose replay holds episodes of one chunk in noise around the VLA's."""
    model = TD3BC(
        "RLTokenPolicy",
        ToyReach(),
        TD3Config(buffer_size=size, batch_size=64, learning_rate=3e-3, net_arch=(64,)),
        seed=0,
    )
    rng = np.random.default_rng(0)
    for _ in range(episodes):
        obs, after = draw(rng), draw(rng)
        offset = rng.uniform(-0.3, 0.3, 7).astype(np.float32)
        action = np.clip(obs["vla_action"] + offset, -1, 1)[None]
        won = success(offset, rng)
        info = {"discount": 0.96, "TimeLimit.truncated": not won}
        batch = ({k: np.asarray(v)[None] for k, v in part.items()} for part in (obs, after))
        model.replay_buffer.add(*batch, action, np.array([won]), np.array([True]), [info])
    model.policy.normalizer.fit(*tokens(model, episodes))
    with RunDir(folder).new_checkpoint(240, keep=1) as checkpoint:
        model.save(checkpoint / "model.zip")
        (checkpoint / "replay.pkl").write_bytes(pickle.dumps(model.replay_buffer))
    return folder


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
    obs = ToyReach().reset(seed=int(rng.integers(2**31)))[0]
    return {**obs, "rl_token": rng.standard_normal(obs["rl_token"].shape).astype(np.float32)}


def tokens(model: TD3BC, size: int) -> list[Any]:
    batch = model.replay_buffer.rows(np.arange(min(size, model.replay_buffer.size())))
    return [batch.observations["rl_token"], batch.observations["proprio"]]


def test_what_offsets_decide_is_known_of_unseen_episodes_and_chance_is_not(tmp_path: Path) -> None:
    found = write_run(tmp_path / "found", lambda offset, _: bool(offset[0] > 0))
    chance = write_run(tmp_path / "chance", lambda _, rng: bool(rng.random() < 0.5))
    kwargs: dict[str, Any] = {"steps": 240, "every": 120, "folds": 2}
    output = tmp_path / "card.json"
    card = check_critics(CriticCheckConfig(found, output=output, **kwargs))
    first, last = card["results"]["rows"]
    assert (first["step"], last["step"]) == (120, 240)
    assert card["results"]["episodes"] == 600
    assert last["advantage"] > 0.5
    assert json.loads(output.read_text())["results"] == card["results"]
    assert format_check(card).count("\n") == 3
    again = check_critics(CriticCheckConfig(found, **kwargs | {"steps": 120}))
    assert again["results"]["rows"] == [first]

    last = check_critics(CriticCheckConfig(chance, **kwargs))["results"]["rows"][-1]
    assert last["seen"] > 0.9  # learned by heart
    assert abs(last["advantage"]) < 0.25


def test_episodes_are_found_in_a_mixed_ring_that_went_round(tmp_path: Path) -> None:
    model, buffer = load_run(write_run(tmp_path, lambda offset, _: offset[0] > 0, 30, size=10))
    buffer.reset()
    rng, truth, episode = np.random.default_rng(3), [], [0]
    obs = draw(rng)
    for _ in range(14):  # episodes end now and then; the ring keeps the last ten rows
        after, done = draw(rng), bool(rng.random() < 0.4)
        batch = ({k: np.asarray(v)[None] for k, v in part.items()} for part in (obs, after))
        flags = np.array([done])
        buffer.add(*batch, obs["vla_action"][None], flags, flags, [{"discount": 0.96}])
        truth.append(episode[0])
        episode[0] += done
        obs = draw(rng) if done else after
    rows = rows_by_age(buffer)
    assert rows.tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2, 3]
    expected = np.unique(truth[-10:], return_inverse=True)[1]
    assert len(set(expected)) > 2
    assert episode_numbers(buffer, rows).tolist() == expected.tolist()
    # two environments side by side: even rows one episode, odd rows another
    buffer.reset()
    for _ in range(2):
        pair = [draw(rng) for _ in range(4)]
        for i in (0, 1):
            batch = ({k: np.asarray(v)[None] for k, v in pair[j].items()} for j in (i, i + 2))
            buffer.add(*batch, pair[i]["vla_action"][None], *[np.zeros(1)] * 2, [{}])
        for i in (0, 1):
            batch = ({k: np.asarray(v)[None] for k, v in pair[j].items()} for j in (i + 2, i))
            buffer.add(*batch, pair[i]["vla_action"][None], np.zeros(1), np.ones(1), [{}])
    # the second of each pair begins where the first ended; each ends where it began
    assert episode_numbers(buffer, rows_by_age(buffer)).tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert model.policy.actor.head.weight.abs().max() == 0


def test_what_cannot_be_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WeightsError, match="no checkpoint"):
        check_critics(CriticCheckConfig(tmp_path))
    run = write_run(tmp_path / "run", lambda offset, _: offset[0] > 0, 30)
    for bad in ({"steps": 0}, {"folds": 1}, {"every": 3000}, {"mc_weight": 1.5}, {"chunks": 0}):
        with pytest.raises(ConfigError, match=f"Expected {next(iter(bad))}"):
            check_critics(CriticCheckConfig(run, **bad))
    with pytest.raises(ConfigError, match="4 finished episodes"):
        check_critics(CriticCheckConfig(run, chunks=4))
    replay = run / "checkpoints" / "000000240" / "replay.pkl"
    replay.write_bytes(bytes(replay.stat().st_size))
    assert main(["critics", "--run", str(run)]) == 2
    assert "no whole checkpoint" in capsys.readouterr().err
