"""Collecting, training, resuming and reporting: on LIBERO's lite pack, and end to end."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_vla import GRUVLA
from run_logs import change_state
from run_logs import rows_of as rows
from safetensors.torch import load_file
from trees import assert_same
from world_model_toys import OneView, toy_sequences

from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError, WeightsError
from vla_gym.rollout import Info
from vla_gym.rollout.noise import NoisyEpisodes
from vla_gym.vector import LiberoVectorEnv
from vla_gym.vla import load
from vla_gym.vla.preprocess import area_downsample
from vla_gym_trainers.cli import main
from vla_gym_trainers.runs.run import Run
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.settings import EVAL_SEED, load_run_settings
from vla_gym_trainers.world_model import train as training
from vla_gym_trainers.world_model.collect import FIRST_SEED, collect, random_chunk
from vla_gym_trainers.world_model.config import WorldModelConfig
from vla_gym_trainers.world_model.data import Sequences
from vla_gym_trainers.world_model.protocol import load_world_model
from vla_gym_trainers.world_model.teacher import Teacher
from vla_gym_trainers.world_model.train import train_world_model
from vla_gym_trainers.world_model.wrapper import WorldModelObservation

TINY: dict[str, Any] = {
    "task_ids": (8,),
    "assets": "lite",
    "random_episodes": 2,
    "vla_episodes": 1,
    "expert_episodes": 1,
    "num_workers": 0,
    "codebook_size": 16,
    "code_size": 4,
    "tokenizer_width": 4,
    "tokenizer_steps": 8,
    "tokenizer_batch_size": 4,
    "memory_hidden": 8,
    "width": 8,
    "num_blocks": 1,
    "steps": 16,
    "batch_size": 2,
    "bptt_length": 3,
    "checkpoint_every": 6,
    "keep_checkpoints": 9,
    "film_every": 0,
    "progress": False,
}


class Short(WorldModelConfig):
    """Episodes of at most 24 control steps."""

    def env_kwargs(self) -> dict[str, Any]:
        return {**super().env_kwargs(), "max_control_steps": 24}


@pytest.fixture(scope="module")
def sequences() -> Sequences:
    counts = {"random": 2, "vla": 1, "expert": 1}
    return collect(load("mini"), Short(**TINY), counts, held_out=True)


def test_what_is_collected(sequences):
    data = sequences
    bounds = data.bounds()
    # 24 control steps: six chunks, of which the observation after the last is not shown.
    assert np.diff(bounds).ravel().tolist() == [6] * 4
    assert data.behaviour[bounds[:, 0]].tolist() == [0, 0, 1, 2] and data.tasks == ["goal_8"]
    assert data.frames.shape == data.agentview.shape == (24, 64, 64, 3)
    assert data.features.shape == (24, 192) and data.actions.shape == (24, 28)
    assert (data.executed.reshape(4, 6) == [4, 4, 4, 4, 4, 0]).all()
    played = data.actions.reshape(4, 6, 28)
    assert (np.abs(played[:, :5]).sum(2) > 0).all() and not played[:, 5].any()
    # LIBERO's bowl, cheese, bottle and plate.
    assert data.objects.shape == (24, 16, 3)
    known = np.isfinite(data.objects).all(axis=(0, 2))
    assert known.tolist() == [True] * 4 + [False] * 12
    assert np.abs(data.objects[:, :4, :2]).max() < 0.5 and (data.objects[:, :4, 2] > 0.8).all()


def test_the_action_of_a_row_leads_to_the_next_rows_frame(sequences):
    """Played again by hand, frame by frame: the VLA's actions with their noise.

    To the rounding of actions to float32, which is how they are kept.
    """
    first, end = sequences.bounds()[2]
    seed = FIRST_SEED["vla"] + EVAL_SEED
    env = LiberoEnv("goal", task_ids=8, assets="lite", chunk_len=4, image_size=128)
    quiet = NoisyEpisodes(env, seed=seed, noise=0.0, expert=False)
    obs, info = quiet.reset(seed=0, options={"task_id": 8})
    vla = load("mini")
    for row in range(first, end):
        shown = {name: area_downsample(obs[name]).astype(int) for name in ("wrist", "agentview")}
        assert np.abs(shown["wrist"] - sequences.frames[row]).mean() < 0.01
        assert np.abs(shown["agentview"] - sequences.agentview[row]).mean() < 0.01
        np.testing.assert_allclose(obs["proprio"], sequences.proprio[row], atol=1e-6)
        views = {name: obs[name][None] for name in ("agentview", "wrist")}
        out = vla.infer(views, [info["instruction"]], obs["proprio"][None])
        features = out.hidden.mean(1)[0].numpy()
        np.testing.assert_allclose(features, sequences.features[row], atol=1e-4)
        obs, *_, info = quiet.step(sequences.actions[row].reshape(4, 7))
    env.close()


def test_sequences_do_not_depend_on_workers_nor_on_how_many_there_are(sequences):
    counts = {"random": 1, "vla": 1, "expert": 0}
    config = Short(**{**TINY, "num_workers": 2, "num_envs": 3})
    fewer = collect(load("mini"), config, counts, held_out=True)
    for episode, other in ((0, 0), (1, 2)):
        mine, theirs = fewer.episode == episode, sequences.episode == other
        for name in ("frames", "agentview", "features", "proprio", "actions", "executed"):
            found, expected = getattr(fewer, name)[mine], getattr(sequences, name)[theirs]
            np.testing.assert_array_equal(found, expected, err_msg=name)


def test_training_plays_other_layouts_and_the_vla_need_not_look_at_the_wrist_camera(sequences):
    train = collect(OneView(), Short(**TINY), {"random": 1, "vla": 0, "expert": 0})
    assert len(train) > 3 and len(train.agentview) == 0 and train.frames.std() > 0
    assert np.abs(train.objects[0, :4, :2] - sequences.objects[0, :4, :2]).max() > 1e-3


def test_random_chunks_are_smooth_bounded_and_a_function_of_the_step():
    def at(step: int, seed: int = 3) -> np.ndarray:
        info = Info(
            suite="goal", task_id=8, init_state_id=-1, seed=1, instruction="", elapsed_steps=step
        )
        return random_chunk(seed, info, 4)

    actions = np.concatenate([at(step) for step in range(0, 480, 4)])
    assert actions.shape == (480, 7) and np.abs(actions).max() <= 1.0
    np.testing.assert_array_equal(at(8), at(8))
    assert (at(8) != at(8, seed=4)).any()
    assert set(np.unique(actions[:, 6])) == {-1.0, 1.0}
    # Constant from one point to the next; what they add up to stays bounded.
    changes = np.flatnonzero((np.diff(actions, axis=0) != 0).any(1)) + 1
    assert set(changes.tolist()) <= set(range(24, 480, 24))
    assert np.abs(np.cumsum(actions[:, :6], axis=0)).max() < 2.5 * 24


def test_a_file_of_sequences_comes_back_and_a_damaged_one_is_refused(tmp_path):
    data = toy_sequences()
    data.save(tmp_path / "data.npz")
    found = Sequences.load(tmp_path / "data.npz")
    for field in dataclasses.fields(Sequences):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(data, field.name))
    (tmp_path / "data.npz").write_bytes((tmp_path / "data.npz").read_bytes()[:500])
    with pytest.raises(WeightsError, match=r"data\.npz holds no sequences"):
        Sequences.load(tmp_path / "data.npz")


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch, sequences: Sequences) -> list[bool]:
    """Collect once; the list tells of every call whether it was for validation."""
    calls: list[bool] = []

    def again(*_: Any, held_out: bool = False) -> Sequences:
        calls.append(held_out)
        return dataclasses.replace(sequences)

    monkeypatch.setattr(training, "collect", again)
    return calls


class Killed(BaseException):
    """Stands for a death between two steps."""


def test_a_cut_off_run_goes_on_bit_for_bit(tmp_path, collected, monkeypatch):
    """Killed before a checkpoint is due, in the tokenizer's training, then in the model's."""
    whole = train_world_model(Short(**TINY, run_dir=tmp_path / "whole"))
    assert collected == [False, True]
    show = Run.show
    for death in (3, 7, 20):

        def dying(run: Run, step: int, *args: Any, death: int = death, **kwargs: Any) -> None:
            show(run, step, *args, **kwargs)
            if step == death:
                raise Killed

        monkeypatch.setattr(Run, "show", dying)
        with pytest.raises(Killed):
            train_world_model(Short(**TINY, run_dir=tmp_path / "cut", auto_resume=True))
    monkeypatch.setattr(Run, "show", show)
    kept = [p.name for p in RunDir(tmp_path / "cut").checkpoints()]
    assert kept == ["000000000", "000000006", "000000012", "000000018"]
    change_state(RunDir(tmp_path / "cut").checkpoints()[-1], collecting_seconds=120.0)
    config = load_run_settings(tmp_path / "cut", Short)
    cut = train_world_model(config)
    assert collected == [False, True] * 2, "what was collected is in data/"
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    minutes = cut["results"].pop("minutes"), whole["results"].pop("minutes")
    assert all(value >= 0 for times in minutes for value in times.values())
    assert minutes[0]["collecting"] == 2.0
    assert cut["results"] == whole["results"]
    weights = [
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("cut", "whole")
    ]
    assert_same(*weights)


@pytest.mark.usefixtures("collected")
def test_the_model_is_written_before_the_checkpoint_of_its_step(tmp_path, monkeypatch):
    save = Teacher.save

    def dying(teacher: Teacher, folder: Path) -> None:
        if teacher.steps == 24:
            raise Killed
        save(teacher, folder)

    monkeypatch.setattr(Teacher, "save", dying)
    with pytest.raises(Killed):
        train_world_model(Short(**{**TINY, "checkpoint_every": 24}, run_dir=tmp_path))
    assert load_world_model(tmp_path / "model")


def test_a_run_with_damage_or_other_settings_is_refused(tmp_path, collected):
    train_world_model(Short(**TINY, run_dir=tmp_path))
    newest = RunDir(tmp_path).checkpoints()[-1]
    trainer = json.loads((newest / "state.json").read_text())["trainer"]
    config = load_run_settings(tmp_path, Short)
    change_state(newest, **trainer | {"sizes": {**trainer["sizes"], "memory_hidden": 9}})
    with pytest.raises(WeightsError, match="is no whole checkpoint of this version"):
        train_world_model(config)
    with pytest.raises(ConfigError, match="steps=16, not 99"):
        train_world_model(dataclasses.replace(config, steps=99))
    change_state(newest, **trainer)
    (tmp_path / "data" / "train.npz").unlink()
    with pytest.raises(WeightsError, match="holds no sequences"):
        train_world_model(config)


def test_bad_settings_are_one_clear_error(tmp_path, collected, capsys):
    with pytest.raises(SystemExit):
        main(["world-model", "--bptt-length", "0"])
    assert "bptt_length: expected `int` >= 1, got 0" in capsys.readouterr().err
    for changes, text in (
        ({"random_episodes": 0, "vla_episodes": 0, "expert_episodes": 0}, "No sequences"),
        ({"noise": 1.5}, "noise: expected `float` <= 1.0, got 1.5"),
    ):
        with pytest.raises(ConfigError, match=text):
            Short(**{**TINY, **changes})
    with pytest.raises(ConfigError, match="No expert plays goal-swap_8"):
        train_world_model(Short(**{**TINY, "suites": ("goal-swap",)}, run_dir=tmp_path / "a"))
    with pytest.raises(ConfigError, match="chunk_len of at most the VLA's horizon 8, got 9"):
        train_world_model(Short(**{**TINY, "chunk_len": 9}, run_dir=tmp_path / "b"))
    assert not collected
    with pytest.raises(ConfigError, match="divisible by num_heads, got 30 and 4"):
        train_world_model(Short(**{**TINY, "width": 30}, run_dir=tmp_path / "d"))
    assert not collected, "sizes are checked before episodes are played"
    with pytest.raises(ConfigError, match="bptt_length=6 steps and one more, the longest has 6"):
        train_world_model(Short(**{**TINY, "bptt_length": 6}, run_dir=tmp_path / "c"))


@pytest.mark.slow
def test_the_tiny_preset_beats_copying(tmp_path, capsys):
    """End to end, as a user runs it; then its model in environments."""
    assert main(["world-model", "--preset", "f1_tiny", "--run-dir", str(tmp_path)]) == 0
    assert "frames of 9 episodes on other layouts" in capsys.readouterr().out
    results = json.loads((tmp_path / "card.json").read_text())["results"]
    found = results["validation"]
    assert found["n_episodes"] == 9 and found["n_frames"] > 300
    assert found["copy_gain"]["low"] > 0.7
    assert found["memory"]["psnr"] > found["copy"]["psnr"] + 0.1
    assert found["tokenizer_psnr"] > 20.0
    assert results["memory_probe"]["recall"]["16"]["n_steps"] > 150
    films = {path.suffix for path in (tmp_path / "videos").iterdir()}
    assert films == {".mp4", ".png"} and list((tmp_path / "tensorboard").iterdir())
    model = load_world_model(tmp_path / "model")
    envs = LiberoVectorEnv(
        2, "goal", task_ids=[1, 5], assets="lite", chunk_len=4, image_size=128, workers=1
    )
    envs = WorldModelObservation(envs, model, {"uncertainty": 0.5, "memory_divergence": 0.5})
    obs, _ = envs.reset(seed=0)
    assert obs in envs.observation_space and obs["world_memory"].shape == (2, 128)
    for _ in range(3):
        obs, rewards, *_ = envs.step(envs.action_space.sample())
        assert ((rewards > 0.0) & (rewards < 1.0)).all()
    envs.close()


def test_a_vla_with_a_state_is_refused(tmp_path, monkeypatch, collected):
    monkeypatch.setattr(training, "load", lambda *_, **__: GRUVLA(load("mini")))
    with pytest.raises(ConfigError, match="'mini-gru' has a state, and a world model looks at"):
        train_world_model(Short(**TINY, run_dir=tmp_path))
    assert not collected
