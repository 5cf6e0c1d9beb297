"""Recorded demonstrations: layout, reproducibility, resuming, retries, wrong settings."""

from __future__ import annotations

import errno
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from vla_gym.demos import record as demos
from vla_gym.demos.config import DemosConfig
from vla_gym.demos.files import (
    _task_attributes,
    demo_path,
    read_episodes,
    read_instruction,
    read_meta,
)
from vla_gym.demos.record import record_demos
from vla_gym.demos.recorder import DemoRecorder
from vla_gym.errors import ConfigError, DemoError, UnknownTaskError
from vla_gym.files import only_process
from vla_gym.remote.shards import ThreadHosts
from vla_gym.rollout import make_envs
from vla_gym.rollout.noise import ActionNoise
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model
from vla_gym.suites.libero.own import own_suite
from vla_gym.vla import load
from vla_gym.vla.preprocess import area_downsample
from vla_gym_trainers.cloning.data import load_demos

# Turning the knob is the shortest task.
TASK = 7


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DemosConfig:
    output = tmp_path_factory.mktemp("demos")
    return DemosConfig(output=str(output), task_ids=(TASK,), num_demos=2, num_workers=0)


@pytest.fixture(scope="module")
def recorded(config: DemosConfig) -> Path:
    (path,) = record_demos(config, progress=False)
    return path


def test_layout_is_that_of_liberos_own_files(config: DemosConfig, recorded: Path) -> None:
    assert recorded == Path(config.output) / "libero_goal/turn_on_the_stove_demo.hdf5"
    assert list(recorded.parent.iterdir()) == [recorded]  # no scratch files
    model = load_task_model(get_task("goal", TASK))
    with h5py.File(recorded, "r") as file:
        data = file["data"]
        assert set(data) == {"demo_0", "demo_1"}
        assert data.attrs["num_demos"] == 2
        assert data.attrs["macros_image_convention"] == "opengl"
        assert data.attrs["env_name"] == "Libero_Tabletop_Manipulation"
        assert data.attrs["bddl_file_content"].startswith("(define (problem LIBERO")
        env_args = json.loads(data.attrs["env_args"])
        assert env_args["type"] == 1 and env_args["problem_name"] == "libero_tabletop_manipulation"
        info = json.loads(data.attrs["problem_info"])
        assert info["language_instruction"] == "turn on the stove"
        total = 0
        for demo in data.values():
            count = int(demo.attrs["num_samples"])
            total += count
            obs = demo["obs"]
            shapes = {name: (obs[name].shape, obs[name].dtype) for name in obs}
            f64 = np.dtype(np.float64)
            image = ((count, 128, 128, 3), np.dtype(np.uint8))
            assert shapes == {
                "agentview_rgb": image,
                "eye_in_hand_rgb": image,
                "ee_pos": ((count, 3), f64),
                "ee_ori": ((count, 3), f64),
                "ee_states": ((count, 6), f64),
                "gripper_states": ((count, 2), f64),
                "joint_states": ((count, 7), f64),
            }
            assert demo["actions"].shape == demo["executed_actions"].shape == (count, 7)
            assert demo["states"].shape == (count, model.init_states.shape[1])
            assert demo["robot_states"].shape == (count, 9)
            assert demo["dones"][()].tolist() == [0] * (count - 1) + [1]
            assert demo["rewards"][()].sum() == 1
            np.testing.assert_array_equal(demo.attrs["init_state"], demo["states"][0])
            assert count - 10 < demo.attrs["success_step"] < count
        assert data.attrs["total"] == total


def test_the_columns_agree_with_each_other(recorded: Path) -> None:
    model = load_task_model(get_task("goal", TASK))
    with h5py.File(recorded, "r") as file:
        demo = file["data/demo_0"]
        states, obs = demo["states"][()], demo["obs"]
        # As upstream observes them, joints are those of one substep of 2 ms before the state.
        # The robot comes first in the model, with one number a joint in qpos and in qvel.
        for key, joints in (
            ("joint_states", model.robot.joint_qpos),
            ("gripper_states", model.robot.gripper_qpos),
        ):
            before = states[:, 1 + joints] - 0.002 * states[:, 1 + model.nq + joints]
            np.testing.assert_allclose(obs[key][()], before, atol=1e-8)  # float32
        np.testing.assert_allclose(np.diff(states[:, 0]), 0.05, atol=1e-9)  # 20 Hz
        robot = demo["robot_states"][()]
        np.testing.assert_array_equal(robot[:, 2:5], obs["ee_pos"][()])
        # A quaternion (x, y, z, w) and its rotation vector, of which robosuite takes the sign.
        angle = 2 * np.arccos(np.clip(robot[:, 8], -1, 1))
        np.testing.assert_allclose(np.linalg.norm(obs["ee_ori"][()], axis=1), angle, atol=1e-5)
        clean, executed = demo["actions"][()], demo["executed_actions"][()]
        np.testing.assert_array_equal(clean[:, 6], executed[:, 6])
        assert 0.01 < np.abs(clean - executed)[:, :3].mean() < 0.5


def test_frames_are_upright_for_readers_and_show_the_scene(recorded: Path) -> None:
    images, proprio, actions = next(read_episodes(recorded))
    with h5py.File(recorded, "r") as file:
        stored = file["data/demo_0/obs/agentview_rgb"][()]
    np.testing.assert_array_equal(images[:, 0], stored[:, ::-1])
    assert images[0].std(axis=(1, 2)).min() > 5.0
    assert np.abs(images[0].astype(int) - images[-1].astype(int)).mean() > 1.0
    assert proprio.dtype == actions.dtype == np.float32
    assert set(np.unique(actions[:, 6])) == {-1.0, 1.0}


def test_no_demonstration_starts_from_an_official_state(recorded: Path) -> None:
    model = load_task_model(get_task("goal", TASK))
    objects = np.array([1 + a + k for a in model.free_qpos.values() for k in range(2)])
    with h5py.File(recorded, "r") as file:
        for demo in file["data"].values():  # what lies on the table says which layout it was
            difference = np.abs(model.init_states - demo.attrs["init_state"])[:, objects]
            assert difference.max(axis=1).min() > 1e-3


def test_mini_trains_on_what_was_recorded(config: DemosConfig, recorded: Path) -> None:
    loaded = load_demos(config.output)
    assert loaded.instructions == ["turn on the stove"] == [read_instruction(recorded)]
    episodes = list(read_episodes(recorded))
    np.testing.assert_array_equal(
        loaded.images, area_downsample(np.concatenate([e[0] for e in episodes]))
    )
    np.testing.assert_array_equal(loaded.actions, np.concatenate([e[2] for e in episodes]))
    assert loaded.episode_end[0] == len(episodes[0][0])
    assert len(load_demos(config.output, demos_per_task=1).images) == len(episodes[0][0])


def forbid_attempts(monkeypatch: pytest.MonkeyPatch, allowed: int = 0) -> list[int]:
    """Let only the first few attempts be played, as if the run was killed then."""
    played: list[int] = []
    original = demos.rollout

    def count(*args: Any) -> Iterator[Any]:
        if not allowed:
            raise KeyboardInterrupt
        for episode in original(*args):
            played.append(episode.start.seed)
            yield episode
            if len(played) == allowed:
                raise KeyboardInterrupt

    monkeypatch.setattr(demos, "rollout", count)
    return played


def test_finished_tasks_are_skipped(
    config: DemosConfig, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_attempts(monkeypatch)
    assert record_demos(config, progress=False) == [recorded]


def test_a_full_disk_leaves_no_half_of_the_settings(
    config: DemosConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, write = replace(config, output=str(tmp_path)), Path.write_text

    def half(path: Path, text: str, **how: Any) -> None:
        write(path, text[:9], **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="No space left"):
            record_demos(again, progress=False)
    forbid_attempts(monkeypatch)
    with pytest.raises(KeyboardInterrupt):  # it comes as far as the first attempt
        record_demos(again, progress=False)


def test_a_stopped_run_goes_on_and_makes_the_same_file(
    config: DemosConfig, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = replace(config, output=str(tmp_path))
    with monkeypatch.context() as patch:
        first = forbid_attempts(patch, allowed=1)
        with pytest.raises(KeyboardInterrupt):
            record_demos(again, progress=False)
    path = demo_path(tmp_path, get_task("goal", TASK))
    assert first == [0] and not path.exists()
    (folder,) = path.parent.iterdir()
    (folder / "00001.hdf5.tmp-1").write_bytes(b"half a file")
    with pytest.raises(ConfigError, match=r"parts was recorded with other settings.*noise"):
        record_demos(replace(again, noise=0.1), progress=False)
    with monkeypatch.context() as patch:
        rest = forbid_attempts(patch, allowed=10)
        record_demos(again, progress=False)
    assert rest[0] == 1  # attempt 0 was not played again
    assert path.read_bytes() == recorded.read_bytes()
    assert list(path.parent.iterdir()) == [path]


def test_several_machines_write_the_same_file(
    config: DemosConfig, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts: Any = ThreadHosts(2)
    placed: list[int] = []
    monkeypatch.setattr(
        hosts, "place", lambda part: placed.append(part) or ThreadHosts.place(hosts, part)
    )
    spread = replace(config, output=str(tmp_path), num_envs=2, hosts=hosts)
    (path,) = record_demos(spread, progress=False)
    assert path.read_bytes() == recorded.read_bytes() and set(placed) == {0, 1}
    # As if each had a folder of its own:
    monkeypatch.setattr(DemoRecorder, "_write", lambda *_: None)
    with pytest.raises(DemoError, match="must be a folder that all machines share"):
        record_demos(replace(spread, overwrite=True), progress=False)


def test_a_vla_is_recorded_in_place_of_the_expert(config: DemosConfig, tmp_path: Path) -> None:
    config = replace(config, output=str(tmp_path / "one"), vla="mini")
    (path,) = record_demos(config, progress=False)
    assert read_meta(path)["vla"]["name"] == "mini"
    vla, text = load("mini"), read_instruction(path)
    for images, proprio, actions in read_episodes(path):
        for t in (0, vla.horizon):  # chunks begin there, and are recorded without the noise
            views = dict(zip(("agentview", "wrist"), images[t][:, None], strict=True))
            chunk = vla.infer(views, [text], proprio[t : t + 1].astype(np.float32)).actions[0]
            rows = actions[t : t + vla.horizon]
            np.testing.assert_allclose(rows, chunk.numpy()[: len(rows)], atol=2e-3)
    with h5py.File(path, "r") as file:
        demo = file["data/demo_0"]
        assert np.abs(demo["executed_actions"][()] - demo["actions"][()]).max() > 0.01
    more = replace(config, output=str(tmp_path / "two"), num_workers=1, num_envs=2)
    assert record_demos(more, progress=False)[0].read_bytes() == path.read_bytes()
    with pytest.raises(ConfigError, match="other settings.*vla"):
        record_demos(replace(config, vla=None), progress=False)


def test_an_expert_that_always_fails_is_one_clear_error(
    config: DemosConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demos, "make_envs", functools.partial(make_envs, max_control_steps=3))
    with pytest.raises(DemoError, match="succeeded in 0 of 8 attempts; 2 demonstrations"):
        record_demos(replace(config, output=str(tmp_path)), progress=False)


def test_a_file_of_other_settings_is_not_mixed_in(config: DemosConfig, recorded: Path) -> None:
    with pytest.raises(ConfigError, match="other settings.*seed"):
        record_demos(replace(config, seed=1), progress=False)
    assert read_meta(recorded)["seed"] == 0


def test_a_damaged_file_is_one_clear_error(config: DemosConfig, tmp_path: Path) -> None:
    path = demo_path(tmp_path, get_task("goal", TASK))
    path.parent.mkdir()
    path.write_bytes(b"no HDF5")
    with pytest.raises(ConfigError, match="cannot be read"):
        record_demos(replace(config, output=str(tmp_path)), progress=False)


def test_damaged_actions_are_one_clear_error(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / recorded.name
    shutil.copy(recorded, path)
    steps = len(next(read_episodes(path))[0])
    for actions, message in (
        (np.nan, r"demo_0: images, states and actions of shapes .*\(\)"),
        (np.full((steps, 7), np.nan), "demo_0: states or actions that are not finite"),
    ):
        with h5py.File(path, "a") as file:
            del file["data/demo_0/actions"]
            file["data/demo_0/actions"] = actions
        with pytest.raises(ConfigError, match=message):
            next(read_episodes(path))


def test_an_episode_without_frames_is_one_clear_error(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / recorded.name
    shutil.copy(recorded, path)
    with h5py.File(path, "a") as file:
        for name in ("actions", *(f"obs/{key}" for key in file["data/demo_0/obs"])):
            values = file[f"data/demo_0/{name}"][:0]
            del file[f"data/demo_0/{name}"]
            file[f"data/demo_0/{name}"] = values
    with pytest.raises(ConfigError, match="demo_0: no frames"):
        next(read_episodes(path))


def test_two_runs_do_not_share_a_folder(config: DemosConfig, tmp_path: Path) -> None:
    with (
        only_process(tmp_path / ".lock", "held"),
        pytest.raises(ConfigError, match="Another run is recording"),
    ):
        record_demos(replace(config, output=str(tmp_path)), progress=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_demos": 0},
        {"seed": -1},
        {"noise": 2.0},
        {"num_workers": -1},
        {"num_envs": 0},
        {"image_size": 8},
        {"suite": ("90",)},
        {"task_ids": (10,)},
        {"lerobot_videos": True},
        {"lerobot": "/"},
        {"lerobot": "/no/such/folder"},  # and no lerobot
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_settings_are_refused(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vla_gym.demos.config.find_spec", lambda _: None)
    with pytest.raises(
        (ConfigError, UnknownTaskError), match="xpected|must be|out of range|needs|install"
    ):
        record_demos(DemosConfig(str(tmp_path / "new"), **wrong), progress=False)
    assert not list(tmp_path.iterdir())


def test_tasks_of_several_suites_come_in_order_and_once() -> None:
    config = DemosConfig(suite=("object", "goal", "object"), task_ids=(3, 1))
    found = [(task.suite, task.task_id) for task in config.tasks()]
    assert found == [("object", 3), ("object", 1), ("goal", 3), ("goal", 1)]
    config = DemosConfig(suite=("goal+spatial",), task_ids=(13,))
    assert config.tasks() == [get_task("spatial", 3)]
    assert len(replace(config, task_ids=None).tasks()) == 20


def test_variants_and_own_files_have_folders_and_attributes(tmp_path: Path) -> None:
    task = get_task("goal-lan", TASK)
    assert demo_path(tmp_path, task).parent.name == "libero_goal_lan"
    assert _task_attributes(task, 128)["bddl_file_name"].startswith("bddl_files/libero_goal_lan/")
    (tmp_path / "mine.bddl").write_text(task.bddl)
    (own,) = own_suite(tmp_path / "mine.bddl").tasks
    assert _task_attributes(own, 128)["bddl_file_content"] == task.bddl


def test_noise_disturbs_the_arm_but_never_the_gripper() -> None:
    action = np.array([0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])
    noise = ActionNoise(0.15, np.random.default_rng(0))
    noisy = np.array([noise(action) for _ in range(200)])
    assert np.all(noisy[:, 6] == 1.0)
    assert np.abs(noisy).max() <= 1.0
    assert noisy[:, :3].std() > 2 * noisy[:, 3:6].std() > 0.0
    np.testing.assert_array_equal(action[:6], [0.5, 0, 0, 0, 0, 0])


# robomimic 0.2, which LIBERO's trainers use, needs modules that reading alone does not, and a name
# that NumPy has given up.
_READ = """
import importlib.util, sys, types
import numpy as np
np.bool = bool
for name in ("torchvision", "torchvision.models", "torchvision.transforms",
             "torchvision.transforms.functional", "tensorboardX", "egl_probe"):
    sys.modules[name] = types.ModuleType(name)
    if "." in name:
        parent, child = name.rsplit(".", 1)
        setattr(sys.modules[parent], child, sys.modules[name])
where = importlib.util.find_spec("libero").submodule_search_locations[0]
spec = importlib.util.spec_from_file_location("datasets", where + "/lifelong/datasets.py")
datasets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(datasets)
modality = {"rgb": ["agentview_rgb", "eye_in_hand_rgb"], "depth": [],
            "low_dim": ["gripper_states", "joint_states"]}
data, shapes = datasets.get_dataset(sys.argv[1], modality, seq_len=10)
assert shapes["ac_dim"] == 7, shapes
assert shapes["all_shapes"]["agentview_rgb"] == [3, 128, 128], shapes
data = datasets.SequenceVLDataset(data, np.zeros(4))
assert data.n_demos == 2 and len(data) == int(sys.argv[2])
item = data[0]
assert item["actions"].shape == (10, 7)
assert item["obs"]["eye_in_hand_rgb"].shape == (10, 3, 128, 128)
"""


@pytest.mark.skipif(find_spec("robomimic") is None, reason="needs robomimic==0.2.0 (pip --no-deps)")
def test_liberos_own_reader_opens_the_file(recorded: Path) -> None:
    with h5py.File(recorded, "r") as file:
        total = str(file["data"].attrs["total"])
    command = [sys.executable, "-c", _READ, str(recorded), total]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
