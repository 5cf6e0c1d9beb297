"""Demonstrations in TD3+BC's replay: every chunk of them, and half of every batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from td3_toys import SMALL
from toy_env import ToyReach

from vla_gym.demos.config import DemosConfig
from vla_gym.demos.record import record_demos
from vla_gym.demos.starts import DemoStarts, read_starts
from vla_gym.errors import ConfigError
from vla_gym.suites import get_task
from vla_gym.vla.preprocess import area_downsample
from vla_gym.wrappers.vla_features import VLAFeatures, look
from vla_gym_trainers import TD3BC, TD3Config
from vla_gym_trainers.networks import reference_chunk
from vla_gym_trainers.td3.prior_data import _number, demo_replay, task_files
from vla_gym_trainers.td3.replay import ChunkReplayBuffer
from vla_gym_trainers.td3.ring import ChunkReplaySamples
from vla_gym_trainers.td3.train import TD3RunConfig, build_model, make_vec, train_td3
from vla_gym_trainers.td3.updates import actor_step, clone_step, held_to

TASK, GAMMA, C = 7, 0.99, 8


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two demonstrations of turning on the stove."""
    output = tmp_path_factory.mktemp("demos")
    record_demos(
        DemosConfig(
            output=str(output), suite=("goal",), task_ids=(TASK,), num_demos=2, num_workers=0
        )
    )
    return output


@pytest.fixture(scope="module")
def config(demos: Path) -> TD3RunConfig:
    settings: dict[str, Any] = {"task_ids": (TASK, 9), "gamma": GAMMA, "progress": False}
    return TD3RunConfig(**settings, workers=0, stride=2, prior_demos=demos)


@pytest.fixture(scope="module")
def env(config: TD3RunConfig) -> Iterator[Any]:
    with closing(make_vec(replace(config, demo_starts=1.0))) as env:
        yield env


@pytest.fixture(scope="module")
def shown(config: TD3RunConfig, env: Any) -> tuple[ChunkReplayBuffer, VLAFeatures]:
    """The demonstrations as transitions, and who looked at them."""
    return demo_replay(config, env.vector_env), env.vector_env.features


def test_every_chunk_of_a_demonstration_is_a_transition(shown: Any, demos: Path) -> None:
    replay, features = shown
    with h5py.File(next(demos.rglob("*.hdf5")), "r") as file:
        demo = file["data/demo_0"]
        count = int(demo.attrs["success_step"]) + 1
        others = int(file["data/demo_1"].attrs["success_step"]) + 1
        executed, clean = demo["executed_actions"][()], demo["actions"][()]
        frame = [demo[f"obs/{key}"][2][::-1] for key in ("agentview_rgb", "eye_in_hand_rgb")]
        grip = demo["obs/ee_pos"][()]
    assert replay.size() == replay.num_added == count + others
    assert replay.task_counts == {TASK: count + others}

    # Rows are in the order in which they became known; the return tells where each begins.
    mine = np.arange(replay.size())[:count]
    start = count - 1 - np.rint(np.log(replay.mc_returns[mine]) / np.log(GAMMA)).astype(int)
    assert sorted(start) == list(range(count))
    steps = np.minimum(C, count - start)
    wins = start + C >= count
    np.testing.assert_array_equal(replay.dones[mine], wins)
    np.testing.assert_allclose(replay.discounts[mine], GAMMA**steps, rtol=1e-6)
    np.testing.assert_allclose(replay.rewards[mine], wins * GAMMA ** (steps - 1.0), rtol=1e-6)
    planned = np.minimum(start[:, None] + np.arange(C), count - 1)
    np.testing.assert_array_equal(replay.actions[mine].reshape(-1, C, 7), executed[planned])
    np.testing.assert_array_equal(replay.observations["demonstrated"][mine], clean[planned])
    assert np.abs(executed - clean)[:, :6].max() > 0.1
    obs, after = replay.observations, replay.next_observations
    np.testing.assert_allclose(obs["proprio"][mine, :3], grip[start], rtol=1e-6)
    going = ~wins
    np.testing.assert_allclose(after["proprio"][mine][going, :3], grip[start[going] + C], rtol=1e-6)

    row = int(np.flatnonzero(start == 2)[0])
    small = area_downsample(np.stack(frame)[None], features.vla.image_size)
    views = dict(zip(("agentview", "wrist"), (small[:, 0], small[:, 1]), strict=True))
    token, chunk = look(
        features.vla, features.rl_token, C, views, ["turn on the stove"], obs["proprio"][[row]]
    )
    np.testing.assert_allclose(obs["rl_token"][row], token[0], atol=1e-4)
    np.testing.assert_allclose(obs["vla_action"][row], chunk[0], atol=1e-4)


def test_whose_a_file_of_demonstrations_is(demos: Path) -> None:
    """In a combined suite, in a folder of its suite, in one of two suites with the same name."""
    number = 10 + TASK
    files = task_files(demos, {number: get_task("spatial+goal", number)})
    assert list(read_starts(files)) == [number]
    (file,) = demos.rglob("*.hdf5")
    for place in (demos, file.parent, file):
        assert task_files(place, {i: get_task("goal", i) for i in (TASK, 9)}) == {file: TASK}
    with pytest.raises(ConfigError, match="has no put_the"):
        task_files(demos, {9: get_task("goal", 9)})
    tasks = {i: get_task("goal+goal-lan", i) for i in (7, 17)}
    name = f"{tasks[7].name}_demo.hdf5"
    assert [_number(Path(f"libero_{s}", name), tasks) for s in ("goal", "goal_lan")] == [7, 17]
    assert _number(Path("libero_goal_lan", name), {7: tasks[7]}) is None
    assert _number(Path("mine", name), tasks) == 7


def test_half_of_a_batch_is_demonstrations(config: TD3RunConfig, env: Any, shown: Any) -> None:
    assert env.env_is_wrapped(DemoStarts) == [True]  # whose starts demo_starts asks for
    replay = build_model(config, env).replay_buffer
    zeros = {key: np.zeros((1, *space.shape)) for key, space in env.observation_space.items()}
    zeros["task_id"] = np.array([9])
    one = np.zeros((1, C, 7)), np.zeros(1), np.array([False]), [{"discount": 0.9}]
    replay.add(zeros, zeros, *one)
    assert (replay.sample(7).observations["task_id"] == 9).all()
    replay.prior, _ = shown
    batch = replay.sample(7)
    # Half of the rows of the one of two tasks that has demonstrations.
    assert batch.observations["task_id"].flatten().tolist() == [9] * 5 + [TASK] * 2
    assert [part.shape[0] for part in batch[1:2] + batch[3:]] == [7] * 6
    assert batch.demonstrated.isnan().all(dim=1).tolist() == [True] * 5 + [False] * 2
    assert batch.observations["task_id"].dtype == batch.next_observations["task_id"].dtype


def transitions(tasks: list[int], demos: list[bool]) -> ChunkReplaySamples:
    """Return transitions of the toy, some demonstrated: the VLA's chunks are 0, those shown 0.1."""
    env = ToyReach()
    rows = [env.reset(seed=i)[0] | {"task_id": np.array([t])} for i, t in enumerate(tasks)]
    obs = {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}
    obs["vla_action"] = torch.zeros_like(obs["vla_action"])
    actions, column = obs["vla_action"].flatten(1) - 0.5, torch.zeros(len(tasks), 1)
    shown = torch.where(torch.tensor(demos)[:, None], torch.full_like(actions, 0.1), torch.nan)
    return ChunkReplaySamples(
        obs, actions, obs, column, column, column + 0.9, column, demonstrated=shown
    )


def test_a_demonstration_holds_the_actor_and_the_vla_less_firmly_beside_it() -> None:
    batch = transitions([3, 3, 9], [True, False, False])
    reference = reference_chunk(batch.observations)
    near, share = held_to(batch, reference, 0.2)
    assert near.mean(dim=1).tolist() == pytest.approx([0.1, 0.0, 0.0])
    assert share.tolist() == pytest.approx([1.0, 0.2, 1.0])
    near, share = held_to(transitions([3, 9, 9], [False] * 3), reference, 0.2)
    assert near.equal(reference) and share.tolist() == [1.0] * 3
    del batch.observations["task_id"]
    assert held_to(batch, reference, 0.2)[1].tolist() == pytest.approx([1.0, 0.2, 0.2])


@pytest.mark.parametrize("actor", ["residual", "plain"])
def test_the_actor_goes_to_what_was_demonstrated(actor: Any) -> None:
    settings: dict[str, Any] = {"actor": actor, "learning_rate": 1e-2, "residual_basis": 1}
    config = TD3Config(**settings, bc_weight=1e3, bc_beside_demos=1.0, net_arch=(64,))
    model = TD3BC("RLTokenPolicy", ToyReach(), config, seed=0)
    batch = transitions([3] * 8 + [9] * 8, [True] * 8 + [False] * 8)
    model.policy.normalizer.fit(batch.observations)
    for _ in range(500):
        if actor == "plain":
            clone_step(model.policy, batch, config, model._rng)
        else:
            actor_step(model.policy, batch, torch.tensor(1e3), config, model._rng)
    with torch.no_grad():
        x = model.policy.normalizer(batch.observations)
        chunk = model.policy.actor(x, reference_chunk(batch.observations))
    assert chunk[:8].mean().item() == pytest.approx(0.1, abs=0.02)
    assert chunk[8:].mean().item() == pytest.approx(0.0, abs=0.02)


def test_episodes_begin_inside_demonstrations(demos: Path) -> None:
    (file,) = demos.rglob("*.hdf5")
    starts = read_starts({file: TASK})
    with h5py.File(file, "r") as opened:
        seen = [opened[f"data/demo_{k}/obs/ee_pos"][()] for k in range(2)]
        lengths = [int(opened[f"data/demo_{k}"].attrs["success_step"]) + 1 for k in range(2)]
    assert [len(demo.actions) for demo in starts[TASK]] == lengths
    bare = gym.make("Libero-goal-v0", task_ids=(TASK, 9), cameras=(), max_control_steps=2)
    env = DemoStarts(bare, starts, 0.5)
    begun = []
    for seed in range(20):
        obs, info = env.reset(seed=seed)
        again, _ = DemoStarts(bare, starts, 0.5).reset(seed=seed)
        np.testing.assert_array_equal(obs["proprio"], again["proprio"])
        env.step(np.zeros(7, np.float32))
        *_, last = env.step(np.zeros(7, np.float32))
        if "demo_steps" not in last:
            plain, _ = bare.reset(seed=seed)
            np.testing.assert_array_equal(obs["proprio"], plain["proprio"])
            continue
        assert info["task_id"] == TASK and info["elapsed_steps"] == 0
        at = last["demo_steps"]
        places = [demo[at] for demo in seen if at < len(demo)]
        assert min(np.abs(obs["proprio"][:3] - place).max() for place in places) < 5e-3
        begun.append(at)
        seed_of_one, places_of_one = seed, obs["proprio"]
    assert len(set(begun)) >= 3
    env.reset(seed=seed_of_one)
    saved = env.get_state()
    other = DemoStarts(gym.make(bare.spec), {}, 0.0)  # type: ignore[arg-type]
    other.reset(seed=0)
    np.testing.assert_array_equal(other.set_state(saved)["proprio"], places_of_one)
    other.step(np.zeros(7, np.float32))
    assert "demo_steps" in other.step(np.zeros(7, np.float32))[-1]


def test_a_vector_env_begins_where_single_ones_do(demos: Path) -> None:
    starts = read_starts(task_files(demos, {TASK: get_task("goal", TASK)}))
    kwargs: dict[str, Any] = {"task_ids": (TASK,), "image_size": 32, "assets": "lite"}
    wrap = partial(DemoStarts, demos=starts, share=1.0)
    with closing(gym.make_vec("Libero-goal-v0", 2, workers=0, env_wrappers=[wrap], **kwargs)) as e:
        both, _ = e.reset(seed=5)
    for i in range(2):
        alone, _ = wrap(gym.make("Libero-goal-v0", **kwargs)).reset(seed=5 + i)
        for key, value in alone.items():
            np.testing.assert_array_equal(both[key][i], value)
    kwargs |= {"workers": 0, "group_size": 2, "cameras": ()}
    grouped = gym.make_vec("Libero-goal-v0", 4, env_wrappers=[wrap], **kwargs)
    with closing(grouped) as e:
        rows = e.reset(seed=5)[0]["proprio"]
    np.testing.assert_array_equal(rows[::2], rows[1::2])
    assert (rows[0] != rows[2]).any()


def test_starts_of_another_scene_or_in_damaged_files_are_refused(demos, tmp_path):
    starts = read_starts(task_files(demos, {TASK: get_task("goal", TASK)}))
    bare = gym.make("Libero-goal-v0", task_ids=(TASK,), cameras=())
    other = {TASK: [demo._replace(state=demo.state[:-1]) for demo in starts[TASK]]}
    with pytest.raises(ConfigError, match="another scene"):
        DemoStarts(bare, other, 1.0).reset(seed=0)
    broken = shutil.copytree(demos, tmp_path / "demos")
    with h5py.File(next(broken.rglob("*.hdf5")), "r+") as file:
        file["data/demo_1/executed_actions"][3, 0] = np.nan
    with pytest.raises(ConfigError, match="not finite"):
        read_starts(dict.fromkeys(broken.rglob("*.hdf5"), TASK))


def test_a_run_with_demonstrations_goes_on_bit_for_bit(config, tmp_path, monkeypatch):
    sample, priors = ChunkReplayBuffer.sample, []

    def spy(buffer: ChunkReplayBuffer, *args: Any, **kwargs: Any) -> Any:
        priors.append(buffer.prior)
        return sample(buffer, *args, **kwargs)

    monkeypatch.setattr(ChunkReplayBuffer, "sample", spy)
    config = replace(config, task_ids=(TASK,), demo_starts=1.0)

    def run(folder: str, chunks: int, **changes: Any) -> bytes:
        short = {**SMALL, "ahead": 0, "eval_states": 0, "total_timesteps": chunks}
        settings = {**short, "run_dir": tmp_path / folder, **changes}
        priors.clear()
        found = train_td3(replace(config, **settings)).run_dir
        assert any(prior is not None for prior in priors)  # it learns from them
        return (found / "last.safetensors").read_bytes()

    whole = run("whole", 32)
    assert run("parts", 24) != whole
    assert run("parts", 32, resume=tmp_path / "parts", run_dir=None) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": ("task=5",), "value_range": None}, "success pays 1"),
        ({"vla_update_freq": 8, "ahead": 0}, "frozen VLA"),
        ({"hosts": "ray", "stride": 0}, "of this process"),
        ({"prior_demos": None, "demo_starts": 0.5}, "give prior_demos"),
        ({"variation": "mild", "demo_starts": 0.5}, "no variation"),
    ],
)
def test_what_demonstrations_do_not_go_with(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(config, **changes)


@pytest.mark.parametrize("pack", ["libero", None])
def test_demonstrations_that_show_another_world_are_refused(config, env, demos, tmp_path, pack):
    """LIBERO's own files say nothing of a pack; their frames are those after the actions."""
    other = shutil.copytree(demos, tmp_path / "demos")
    with h5py.File(next(other.rglob("*.hdf5")), "r+") as file:
        meta = json.loads(file["data"].attrs.pop("vla_gym"))
        if pack is not None:
            file["data"].attrs["vla_gym"] = json.dumps({**meta, "pack": pack})
    with pytest.raises(ConfigError, match="shows (libero|an)"):
        demo_replay(replace(config, prior_demos=other), env.vector_env)
