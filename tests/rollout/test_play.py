"""vla-gym play: tiles, captions, files, who plays, and what is refused."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest

from vla_gym.cli import main as cli
from vla_gym.disk_full import is_disk_full
from vla_gym.envs.libero import LiberoEnv
from vla_gym.errors import ConfigError, UnknownTaskError
from vla_gym.files import scratch_path
from vla_gym.rollout import ExpertPolicy, Policy, Start
from vla_gym.rollout.film import film, record_video
from vla_gym.rollout.video import (
    GREEN,
    RED,
    Status,
    TileFrames,
    _wrap,
    compose_grid,
    draw_tile,
    num_columns,
    text_rows,
    tiled_frames,
    write_video,
)
from vla_gym.rollout.vla_policy import VLAPolicy
from vla_gym_trainers.evaluation.play import PlayConfig, play_video

LONG = "pick up the black bowl between the plate and the ramekin and place it on the plate"
HOLD = 30  # frames that the last picture stays


def has_colour(picture: np.ndarray, colour: tuple[int, int, int], tolerance: int = 0) -> bool:
    return bool((np.abs(picture.astype(int) - colour).max(axis=2) <= tolerance).any())


def draw(instruction: str, status: Status, size: int = 128) -> np.ndarray:
    images = [np.full((size, size, 3), value, np.uint8) for value in (40, 80)]
    return draw_tile(images, instruction, status, text_rows([instruction, LONG], 2 * size))


def test_tiles_have_one_shape_and_show_the_images() -> None:
    status = Status("VLA", 3, 10)
    short, long = draw("open it", status), draw(LONG, status)
    assert short.shape == long.shape and short.shape[1] == 256
    assert short.shape[0] % 2 == 0 and short.shape[0] > 128 + 3 * 10
    assert (short[:128, :128] == 40).all() and (short[:128, 128:] == 80).all()
    # The long instruction has a second line, where the short one has nothing.
    assert (short[128:] != long[128:]).any()


@pytest.mark.parametrize(
    ("status", "shown", "absent"),
    [
        (Status("VLA", 3, 10), None, (GREEN, RED)),
        (Status("VLA", 3, 10, success=True, over=True), GREEN, (RED,)),
        (Status("VLA", 10, 10, over=True), RED, (GREEN,)),
    ],
)
def test_the_outcome_has_its_colour(status: Status, shown: Any, absent: Any) -> None:
    tile = draw("open it", status)
    assert shown is None or (has_colour(tile[:128], shown) and has_colour(tile[130:-6], shown, 40))
    assert not any(has_colour(tile, colour) for colour in absent)


def test_the_instruction_is_never_wider_than_the_tile() -> None:
    lines = _wrap(LONG, 64)
    assert len(lines) > 5 and " ".join(lines) == LONG
    tile = draw_tile(
        [np.zeros((64, 64, 3), np.uint8)], LONG, Status("a long name", 9, 10), len(lines)
    )
    assert tile.shape[1:] == (64, 3) and tile.shape[0] > 64 + 10 * len(lines)


@pytest.mark.parametrize(("tiles", "columns"), [(1, 1), (2, 2), (4, 2), (10, 4)])
def test_grids_are_about_as_wide_as_a_screen(tiles: int, columns: int) -> None:
    assert num_columns(tiles, 512, 310) == columns


def test_a_tile_that_ended_keeps_its_last_frame() -> None:
    tiles = [TileFrames(), TileFrames()]
    for tile, length in zip(tiles, (2, 4), strict=True):
        for step in range(length):
            tile.append(np.full((32, 48, 3), 40 * (step + 1), np.uint8))
    frames = list(tiled_frames(tiles))
    assert len(frames) == 4 + 30
    values = [(int(f[5, 5, 0]), int(f[5, -5, 0])) for f in frames]
    assert values == [(40, 40), (80, 80), (80, 120), (80, 160)] + 30 * [(80, 160)]


def test_grid_places_are_row_by_row() -> None:
    grid = compose_grid([np.full((10, 20, 3), i + 100, np.uint8) for i in range(3)], columns=2)
    assert grid.shape == (26, 46, 3)
    assert [grid[5, 5, 0], grid[5, 40, 0], grid[20, 5, 0]] == [100, 101, 102]
    assert grid[20, 40, 0] < 30 and grid[5, 22, 0] < 30


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_written_files_show_what_was_given(suffix: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(40, 255, (8, 5, 6, 3), dtype=np.uint8)
    frames = blocks.repeat(18, axis=1).repeat(17, axis=2)  # 90 x 102: no multiples of 16
    path = write_video(tmp_path / "new" / f"film{suffix}", iter(frames))
    read = iio.imread(path)
    every = frames if suffix == ".mp4" else frames[::2]
    assert read.shape[:3] == every.shape[:3]
    assert np.abs(read[..., :3].astype(int) - every).mean() < 12
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    def broken() -> Any:
        yield np.zeros((32, 32, 3), np.uint8)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_video(tmp_path / "film.mp4", broken())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "count"), [("film.mp4", 1), ("film.gif", 300)])
def test_a_full_disk_is_an_error_and_the_old_file_stays(
    name: str, count: int, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"old")

    def frames() -> Any:
        scratch_path(tmp_path / name).symlink_to("/dev/full")
        rng = np.random.default_rng(0)
        for _ in range(count):
            yield rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)

    with pytest.raises(OSError, match="ffmpeg ended with") as raised:
        write_video(tmp_path / name, frames())
    assert is_disk_full(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"old"


def test_ffmpeg_that_ends_early_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ffmpeg"
    program.write_text("#!/bin/sh\necho No such codec >&2\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("imageio_ffmpeg.get_ffmpeg_exe", lambda: str(program))
    frames = np.zeros((20, 256, 256, 3), np.uint8)
    with pytest.raises(OSError, match="ended with 3.*No such codec"):
        write_video(tmp_path / "film.mp4", frames)
    assert list(tmp_path.iterdir()) == [program]


def test_an_expert_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "stove.mp4"
    arguments = ["--task-id", "7", "--init-state-id", "3", "--size", "64", "--out", str(out)]
    assert cli.main(["play", *arguments]) == 0
    text = capsys.readouterr().out
    assert "goal 7 state 3: success, " in text and f"{out}: success" in text
    steps = int(text.split("success, ")[1].split()[0])
    film = iio.imread(out)
    assert len(film) == 1 + steps + HOLD and film.shape[2] == 128
    assert not has_colour(film[0], GREEN, 40) and has_colour(film[-1], GREEN, 40)


def test_tiles_of_tasks_and_seeds(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "random.gif"
    arguments = ["--policy", "random", "--task-ids", "1", "8", "--seeds", "5", "6", "--size", "64"]
    arguments += ["--max-steps", "6", "--cameras", "agentview", "--out", str(out)]
    assert cli.main(["play", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:4]] == [
        f"goal {task} seed {seed}" for task in (1, 8) for seed in (5, 6)
    ]
    assert lines[4] == f"{out}: 0 of 4 succeeded"
    assert iio.imread(out).shape[2] > 2 * 64


def test_the_film_starts_where_the_environment_does() -> None:
    """Tile and environment of the same seed show the same picture."""
    ((episode, frames),) = film(
        VLAPolicy("mini"),
        [Start("goal", 8, -1, 4)],
        cameras=("agentview",),
        size=64,
        max_control_steps=2,
    )
    assert (episode.length, len(frames)) == (2, 3)
    with LiberoEnv("goal", task_ids=8, image_size=64) as env:
        obs, _ = env.reset(seed=4)
    assert np.abs(frames[0][:64].astype(int) - obs["agentview"]).mean() < 4  # JPEG


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("film.mp4", {"starts": []}, "at least one start"),
        ("film.avi", {}, "must end in .mp4 or .gif"),
        ("film.mp4", {"cameras": ("hand",)}, "cameras must be one of 'agentview', 'wrist'"),
        ("film.mp4", {"cameras": ()}, "at least one camera"),
        ("film.mp4", {"size": 0}, "size must be in 1..4096, got 0"),
    ],
)
def test_what_cannot_be_filmed_is_refused_before_it_is_played(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"starts": [Start("goal", 8, 0)], "assets": "none", **change}
    with pytest.raises(ConfigError, match=message):
        record_video(tmp_path / name, ExpertPolicy(), **settings)
    assert not list(tmp_path.iterdir())


class Stays(VLAPolicy):
    """Sees what the VLA sees, and does nothing."""

    def act(self, observations: Any, infos: Any) -> np.ndarray:
        return np.zeros_like(super().act(observations, infos))


def test_every_control_step_is_filmed_whoever_acts(tmp_path: Path) -> None:
    films = []
    for name, kind in (("vla.mp4", VLAPolicy), ("own.mp4", Stays)):
        policy: Policy = kind("mini", chunk_len=4)
        settings: dict[str, Any] = {"size": 64, "max_control_steps": 6}
        (episode,) = record_video(tmp_path / name, policy, [Start("goal", 8, 0)], **settings)
        assert episode.truncated and episode.length == 6  # two chunks, the second one cut
        films.append(iio.imread(tmp_path / name))
    assert [len(frames) for frames in films] == [1 + 6 + HOLD] * 2
    assert np.abs(films[0][6].astype(int) - films[1][6]).mean() > 0.5


def test_a_trained_policy_on_the_command_line(tmp_path: Path, capsys: Any) -> None:
    from vla_gym_trainers import TD3BC, TD3Config, make_sb3_vec_env

    env = make_sb3_vec_env("LiberoVLA-goal-v0", num_envs=1, task_ids=8, chunk_len=5)
    with closing(env):
        model = TD3BC("RLTokenPolicy", env, TD3Config(buffer_size=10))
        model.policy.save(tmp_path / "policy.safetensors")
    out = tmp_path / "policy.mp4"
    arguments = ["--policy", str(tmp_path), "--max-steps", "7", "--size", "64"]
    assert cli.main(["play", *arguments, "--out", str(out)]) == 0
    assert "goal 8 state 0: no success, 7 steps" in capsys.readouterr().out
    assert len(iio.imread(out)) == 1 + 7 + HOLD


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out": Path("film.avi")}, ConfigError, "must end in .mp4 or .gif"),
        ({"out": Path("/proc/film.mp4")}, ConfigError, "cannot be written"),
        ({"task_ids": (10,)}, UnknownTaskError, "out of range"),
        ({"task_ids": ()}, ConfigError, "got 0"),
        ({"init_state_ids": (50,)}, ConfigError, "init_states"),
        ({"init_state_ids": tuple(range(50)), "task_ids": (1, 2, 3)}, ConfigError, "got 150"),
        ({"seeds": (-1,)}, ConfigError, "seeds"),
        ({"seeds": (1,), "init_state_ids": (0,)}, ConfigError, "not both"),
        ({"size": 65}, ConfigError, "size: expected"),
        ({"max_steps": 0}, ConfigError, "max_steps"),
        ({"policy": "vla", "rl_token": "mean"}, ConfigError, "belongs to a trained policy"),
        ({"policy": "vla", "device": "cuda:99"}, ConfigError, "is not there"),
        ({"suite": "90", "task_ids": (0,)}, UnknownTaskError, "No expert .*vla-gym tasks"),
    ],
    ids=str,
)
def test_mistakes_are_said_before_anything_is_played(
    change: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    config = replace(PlayConfig(out=tmp_path / "film.mp4"), **change)
    with pytest.raises(error, match=message):
        play_video(config)
    assert not list(tmp_path.iterdir())
