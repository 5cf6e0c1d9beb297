"""Recorded demonstrations: content, reproducibility, resuming, wrong settings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vla_gym.demos import DemosConfig, _attempt, record_demos
from vla_gym.errors import ConfigError, UnknownTaskError
from vla_gym.experts.recording import ActionNoise
from vla_gym.suites import get_task

# Turning the knob is the shortest task.
TASK = 7


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DemosConfig:
    output = tmp_path_factory.mktemp("demos")
    return DemosConfig(output=str(output), task_ids=(TASK,), num_demos=2, num_workers=0)


@pytest.fixture(scope="module")
def recorded(config: DemosConfig) -> dict[str, np.ndarray]:
    (path,) = record_demos(config, progress=False)
    assert path == Path(config.output) / f"goal_{TASK}.npz"
    with np.load(path, allow_pickle=False) as data:
        return {key: data[key] for key in data.files}


def test_arrays_have_the_promised_shapes(recorded: dict[str, np.ndarray]) -> None:
    lengths = recorded["episode_lengths"]
    frames = int(lengths.sum())
    assert lengths.shape == (2,) and lengths.min() > 20
    assert recorded["images"].shape == (frames, 2, 64, 64, 3)
    assert recorded["images"].dtype == np.uint8
    assert recorded["proprio"].shape == (frames, 8) and recorded["proprio"].dtype == np.float32
    assert recorded["actions"].shape == (frames, 7) and recorded["actions"].dtype == np.float32
    assert np.abs(recorded["actions"]).max() <= 1.0
    assert set(np.unique(recorded["actions"][:, 6])) == {-1.0, 1.0}
    assert str(recorded["instruction"]) == get_task("goal", TASK).instruction
    meta = json.loads(str(recorded["meta"]))
    assert (meta["pack"], meta["seed"], meta["task_id"]) == ("lite", 0, TASK)
    assert meta["attempts"] >= 2


def test_frames_show_the_scene_and_change(recorded: dict[str, np.ndarray]) -> None:
    images = recorded["images"]
    assert images[0].std(axis=(1, 2)).min() > 5.0
    last = int(recorded["episode_lengths"][0]) - 1
    assert np.abs(images[0].astype(int) - images[last].astype(int)).mean() > 1.0


def test_an_attempt_depends_on_seed_task_and_number_alone(
    config: DemosConfig, recorded: dict[str, np.ndarray]
) -> None:
    # In reverse order; an attempt that fails is not among the recorded ones.
    attempts = [_attempt(config, TASK, number) for number in reversed(range(4))]
    first, second = [episode for episode in reversed(attempts) if episode is not None][:2]
    count = len(first)
    np.testing.assert_array_equal(first.images, recorded["images"][:count])
    np.testing.assert_array_equal(first.actions, recorded["actions"][:count])
    np.testing.assert_array_equal(second.proprio, recorded["proprio"][count:])


def test_finished_tasks_are_skipped(
    config: DemosConfig, recorded: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a finished task was recorded again")

    monkeypatch.setattr("vla_gym.demos._attempt", never)
    assert record_demos(config, progress=False)
    assert not list(Path(config.output).glob("*.tmp*"))


def test_a_file_of_other_settings_is_not_mixed_in(
    config: DemosConfig, recorded: dict[str, np.ndarray]
) -> None:
    with pytest.raises(ConfigError, match="other settings.*seed"):
        record_demos(replace(config, seed=1), progress=False)


def test_a_damaged_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / f"goal_{TASK}.npz").write_bytes(b"no zip")
    with pytest.raises(ConfigError, match="cannot be read"):
        record_demos(DemosConfig(str(tmp_path), task_ids=(TASK,), num_workers=0), progress=False)


@pytest.mark.parametrize(
    "wrong",
    [{"num_demos": 0}, {"seed": -1}, {"noise": 2.0}, {"num_workers": -1}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        DemosConfig(**wrong)  # type: ignore[arg-type]


def test_unknown_task_is_refused() -> None:
    with pytest.raises(UnknownTaskError):
        DemosConfig(task_ids=(10,))


def test_noise_disturbs_the_arm_but_never_the_gripper() -> None:
    action = np.array([0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    noise = ActionNoise(0.15, np.random.default_rng(0))
    noisy = np.array([noise(action) for _ in range(200)])
    assert np.all(noisy[:, 6] == 1.0)
    assert np.abs(noisy).max() <= 1.0
    assert noisy[:, :3].std() > 2 * noisy[:, 3:6].std() > 0.0
    np.testing.assert_array_equal(action[:6], [0.5, 0, 0, 0, 0, 0])


@pytest.mark.slow
def test_workers_record_the_same_as_one_process(
    config: DemosConfig, recorded: dict[str, np.ndarray], tmp_path: Path
) -> None:
    (path,) = record_demos(replace(config, output=str(tmp_path), num_workers=2), progress=False)
    with np.load(path, allow_pickle=False) as data:
        for key, value in recorded.items():
            np.testing.assert_array_equal(data[key], value, err_msg=key)
