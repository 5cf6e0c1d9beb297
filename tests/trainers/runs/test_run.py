"""The run lifecycle, with a trainer that counts: begin, stop, go on, checkpoints, films, logs."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from run_logs import rows_of as rows
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from vla_gym.errors import ConfigError, DiskFullError, WeightsError
from vla_gym.files import scratch_path
from vla_gym_trainers.cloning.config import MiniConfig
from vla_gym_trainers.runs.run import Run
from vla_gym_trainers.runs.run_dir import Checkpoint, RunDir
from vla_gym_trainers.runs.settings import (
    CheckpointSettings,
    RunSettings,
    default_run_dir,
    load_preset,
    load_run_settings,
    parse_config,
)
from vla_gym_trainers.td3.config import TD3RunConfig


@dataclass
class CountConfig(CheckpointSettings):
    """Count."""

    algorithm: ClassVar[str] = "count"
    resumable: ClassVar[tuple[str, ...]] = (*CheckpointSettings.resumable, "total")

    suite: str = "goal"
    task_ids: tuple[int, ...] = (9,)
    vla: str = "mini"
    total: int = 40
    seed: int = 0
    checkpoint_every: int = 10
    progress: bool = False


def count(config: CountConfig, at: Any = None) -> dict[str, Any]:
    """Add random numbers; call ``at`` after every step."""
    rng, total, step = np.random.default_rng(config.seed), 0.0, 0
    with Run(config, total=config.total) as run:
        if run.checkpoint is not None:
            step, state = run.checkpoint.step, run.checkpoint.state
            rng.bit_generator.state, total = state["rng"], float(state["total"])
            assert (run.checkpoint.folder / "blob").read_text() == str(step)
        with run.training():
            while not run.is_over(step):
                total, step = total + rng.random(), step + 1
                run.show(step, success=0.5)
                run.logger.record_mean("mean", total)
                if step % 4 == 0:
                    run.log({"total": total}, step)
                run.film_if_due(step, lambda path: path.write_bytes(b"film"))
                if at is not None:
                    at(step)
                if run.is_checkpoint_due(step) or run.is_over(step):
                    state = {"rng": rng.bit_generator.state, "total": total}
                    with run.new_checkpoint(step, state) as folder:
                        (folder / "blob").write_text(str(step))
        return run.write_card({"total": total, **run.throughput(step)}, {})


def names(path: Path) -> list[str]:
    return [checkpoint.name for checkpoint in RunDir(path).checkpoints()]


class Killed(BaseException):
    """Stands for a death between two steps."""


def killed_at(step: int) -> Any:
    def kill(now: int) -> None:
        if now == step:
            raise Killed

    return kill


def test_a_cut_off_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = count(CountConfig(run_dir=tmp_path / "whole"))
    with pytest.raises(Killed):
        count(CountConfig(run_dir=tmp_path / "cut"), killed_at(26))
    assert names(tmp_path / "cut") == ["000000010", "000000020"]
    cut = count(load_run_settings(tmp_path / "cut", CountConfig))
    assert cut["results"]["total"] == whole["results"]["total"]
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    assert len(rows(tmp_path / "whole")) == 10 and cut["kind"] == "count"
    assert json.loads((tmp_path / "cut" / "card.json").read_text()) == cut
    config = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert not {"resume", "auto_resume"} & config.keys()


def test_it_goes_on_from_the_checkpoint_that_is_named(tmp_path: Path) -> None:
    first = count(CountConfig(run_dir=tmp_path, keep_checkpoints=9))
    before = rows(tmp_path)
    config = load_run_settings(tmp_path / "checkpoints" / "000000010", CountConfig)
    assert config.run_dir == tmp_path
    with pytest.raises(Killed):
        count(config, killed_at(12))
    # What came after it belonged to the continuation that was replaced.
    assert names(tmp_path) == ["000000010"] and rows(tmp_path)[-1]["step"] == 12
    again = count(load_run_settings(tmp_path, CountConfig))
    assert again["results"]["total"] == first["results"]["total"] and rows(tmp_path) == before
    config.run_dir = tmp_path / "elsewhere"
    with pytest.raises(ConfigError, match="stays in its folder"):
        count(config)
    with pytest.raises(ConfigError, match="there are: 000000010"):
        count(load_run_settings(tmp_path / "checkpoints" / "000000011", CountConfig))


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    leftover = scratch_path(tmp_path / "card.json")
    leftover.write_text("half a card")
    with RunDir(tmp_path).lock():
        assert not leftover.exists()


def test_auto_resume_begins_or_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of one second are read in the order of their names: number 10 before number 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    config = CountConfig(run_dir=tmp_path, auto_resume=True)
    with pytest.raises(Killed):
        count(config, killed_at(5))  # before its first checkpoint
    with pytest.raises(Killed):
        count(config, killed_at(15))
    whole = count(CountConfig(run_dir=tmp_path / "b"))
    assert count(config)["results"]["total"] == whole["results"]["total"]
    shown = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("total")
    assert [point.step for point in shown] == list(range(4, 41, 4))
    with pytest.raises(ConfigError, match="--auto-resume needs a --run-dir"):
        count(CountConfig(auto_resume=True))
    with pytest.raises(ConfigError, match="seed=0, not 1"):
        count(CountConfig(run_dir=tmp_path, auto_resume=True, seed=1))
    with pytest.raises(ConfigError, match=f"count --resume {tmp_path}"):
        count(CountConfig(run_dir=tmp_path))
    shutil.rmtree(tmp_path / "checkpoints")  # to save space: its results stay
    for again in (config, CountConfig(run_dir=tmp_path), CountConfig(resume=tmp_path)):
        with pytest.raises(ConfigError, match="a run that is over"):
            count(again)
    assert (tmp_path / "card.json").is_file()


def test_a_damaged_checkpoint_is_left_out_with_a_warning(tmp_path: Path) -> None:
    count(CountConfig(run_dir=tmp_path))
    (tmp_path / "checkpoints" / "000000040" / "blob").write_text("half a copy")
    with pytest.warns(UserWarning, match="000000040 is no whole checkpoint"):
        card = count(load_run_settings(tmp_path, CountConfig))
    assert names(tmp_path) == ["000000030", "000000040"]
    assert card["results"]["total"] > 0
    newest = RunDir(tmp_path).checkpoints()[-1]
    assert Checkpoint.read(newest).step == 40
    state = json.loads((newest / "state.json").read_text())
    (newest / "state.json").write_text(json.dumps({**state, "format": 0}))
    with pytest.raises(WeightsError, match="has format 0, expected .* begin a new run"):
        Checkpoint.read(newest)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_a_checkpoint(tmp_path, capsys, number):
    def at(step: int) -> None:
        if step == 13:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt, match=f"vla-gym-train count --resume {tmp_path}"):
        count(CountConfig(run_dir=tmp_path), at)
    assert "Stopping, with a checkpoint" in capsys.readouterr().err
    assert names(tmp_path) == ["000000010", "000000013"]
    assert not (tmp_path / "card.json").exists()
    count(load_run_settings(tmp_path, CountConfig))
    assert names(tmp_path) == ["000000030", "000000040"]


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (KeyboardInterrupt(), "Stopped: run the command again"),
        (OSError(errno.ENOSPC, "full"), "free some space and run the command again"),
    ],
)
def test_without_checkpoints_nobody_is_told_to_resume(tmp_path, end, said):
    with (
        pytest.raises((KeyboardInterrupt, DiskFullError), match=said),
        Run(RunSettings(run_dir=tmp_path), total=1),
    ):
        raise end


def test_time_is_a_limit_and_counts_on(tmp_path: Path) -> None:
    card = count(CountConfig(run_dir=tmp_path, max_minutes=1e-9))
    assert names(tmp_path) == [] and card["results"]["total"] == 0.0
    count(CountConfig(run_dir=tmp_path / "b"))
    seconds = Checkpoint.read(RunDir(tmp_path / "b").checkpoints()[-1]).run["seconds"]
    limited = load_run_settings(tmp_path / "b", CountConfig)
    limited.total, limited.max_minutes = 80, seconds / 120
    count(limited)
    assert names(tmp_path / "b") == ["000000030", "000000040"]


def test_films_come_every_so_many_episodes_also_after_a_resume(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        count(CountConfig(run_dir=tmp_path, film_every=12), killed_at(22))
    count(load_run_settings(tmp_path, CountConfig))
    films = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert films == [f"episode_{n:07d}.mp4" for n in (12, 24, 36)]


def test_weights_and_biases_only_if_asked_for_and_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        count(CountConfig(run_dir=tmp_path, wandb="project"))
    calls: list[Any] = []
    stub = types.SimpleNamespace(
        log=lambda values, step: calls.append((step, sorted(values))), finish=lambda: None
    )
    module = types.SimpleNamespace(init=lambda **options: calls.append(options) or stub)
    monkeypatch.setitem(sys.modules, "wandb", module)
    count(CountConfig(run_dir=tmp_path, wandb="project", total=8))
    assert calls[0]["project"] == "project" and calls[0]["resume"] == "allow"
    assert calls[1:] == [(4, ["mean", "total"]), (8, ["mean", "total"])]
    count(CountConfig(run_dir=tmp_path, wandb="project", auto_resume=True))
    again = [call for call in calls if isinstance(call, dict)][1]
    assert again["id"] == calls[0]["id"]


def test_options_come_after_a_preset_or_a_run(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("task_ids: [3, 4]\nseed: 7\nrun_dir: runs/x\n")
    arguments = ["--seed", "8", "--preset", str(preset), "--no-progress"]
    config = parse_config(CountConfig, arguments)
    assert (config.task_ids, config.seed, config.run_dir) == ((3, 4), 8, Path("runs/x"))
    assert parse_config(CountConfig, [f"--preset={preset}"]) == load_preset(
        CountConfig, str(preset)
    )
    count(CountConfig(run_dir=tmp_path / "run", seed=5))
    config = parse_config(CountConfig, ["--total", "50", f"--resume={tmp_path / 'run'}"])
    assert (config.seed, config.total, config.resume) == (5, 50, tmp_path / "run")
    count(config)
    assert names(tmp_path / "run")[-1] == "000000050"
    with pytest.raises(ConfigError, match="leave --preset out"):
        parse_config(CountConfig, ["--resume", str(tmp_path / "run"), "--preset", str(preset)])
    with pytest.raises(ConfigError, match="config.json does not exist"):
        parse_config(CountConfig, ["--resume", str(tmp_path)])
    with pytest.raises(ConfigError, match="one of td3_ablation, .*, td3_suite or the path"):
        load_preset(TD3RunConfig, "td3_gaol")
    preset.write_text("vla: class:os:system\n")
    with pytest.raises(ConfigError, match="only the command line may"):
        parse_config(CountConfig, ["--preset", str(preset)])


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match="checkpoint_every: expected `int` >= 1"):
        TD3RunConfig(checkpoint_every=0)
    with pytest.raises(ConfigError, match="seed: expected `int` >= 0"):
        MiniConfig(seed=-1)


def test_run_directories_are_named_by_what_is_trained() -> None:
    assert str(default_run_dir(CountConfig(task_ids=(1, 2)))).startswith("runs/count-goal-1_2-")
    assert str(default_run_dir(CountConfig(suite=()))).startswith("runs/count-9-")
