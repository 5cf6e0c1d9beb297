"""A killed run goes on bit for bit; whole checkpoints only; what a run directory holds."""

from __future__ import annotations

import functools
import io
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import resume_target
import torch
from resume_target import TINY, make_toy_vec, use_toy
from run_logs import rows_of, rows_without_times
from trees import assert_same

from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers.report.data import read_rows
from vla_gym_trainers.runs.metrics import RunLogger
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.td3.checkpoint import load_checkpoint, save_checkpoint
from vla_gym_trainers.td3.train import TD3RunConfig, build_model, train_td3

#: Seconds for anything that takes a few: machines may be busy.
PATIENCE = 280
_CONTEXT = multiprocessing.get_context("forkserver")
pytestmark = pytest.mark.timeout(3 * PATIENCE)
_CONTEXT.set_forkserver_preload(["resume_target"])


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    use_toy(monkeypatch)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def start(run_dir: Path, resume: bool = False, kill_in_save: int = 0, **changes: Any) -> Any:
    process = _CONTEXT.Process(
        target=resume_target.train, args=(str(run_dir), changes, resume, kill_in_save)
    )
    with pytest.MonkeyPatch.context() as patch:  # for what the fork server loads beforehand
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        process.start()
    return process


def finish(process: Any, code: int = 0) -> None:
    process.join(PATIENCE)
    assert process.exitcode == code


def result(run_dir: Path) -> dict[str, Any]:
    """Everything that a run made, without times, in a form that can be compared."""
    newest = RunDir(run_dir).checkpoints()[-1]
    replay = pickle.loads((newest / "replay.pkl").read_bytes())
    loop = pickle.loads((newest / "loop.pkl").read_bytes())
    training = json.loads((run_dir / "card.json").read_text())["results"]["training"]
    archive = zipfile.ZipFile(newest / "model.zip")
    tensors = {
        name: torch.load(io.BytesIO(archive.read(name)), weights_only=True)
        for name in archive.namelist()
        if name.endswith(".pth")
    }
    return {
        "name": newest.name,
        "tensors": tensors,
        "best": (run_dir / "best.safetensors").read_bytes(),
        "last": (run_dir / "last.safetensors").read_bytes(),
        "replay": replay.rows(np.arange(replay.size())),
        "replay_rng": replay.rng.bit_generator.state,
        "env": [(s.env["position"], s.env["rng"].bit_generator.state) for s in loop["env"]["envs"]],
        "metrics": rows_of(run_dir),
        "training": {
            k: v for k, v in training.items() if k not in ("minutes", "chunks_per_second")
        },
    }


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[int], tuple[dict[str, Any], float]]:
    """Result of the run that nobody killed, and how many seconds it trained; by ``ahead``."""

    @functools.cache
    def train(ahead: int) -> tuple[dict[str, Any], float]:
        folder = tmp_path_factory.mktemp("uninterrupted") / "run"
        finish(start(folder, ahead=ahead))
        made = result(folder)
        assert made["name"] == "000000240"
        assert len(made["metrics"]) >= 3
        minutes = json.loads((folder / "card.json").read_text())["results"]["training"]["minutes"]
        return made, 60 * minutes

    return train


def kill_and_resume(folder: Path, delays: list[float], ahead: int) -> int:
    """Kill a run after each delay (seconds after it began to log), then let it end.

    Returns:
        How many kills came before its end.
    """
    kills, process = 0, start(folder, ahead=ahead)
    for delay in delays:
        deadline = time.monotonic() + PATIENCE
        while process.is_alive() and not (folder / "metrics.jsonl").exists():
            assert time.monotonic() < deadline
            time.sleep(0.002)
        process.join(delay)
        if process.is_alive():
            process.kill()
            kills += 1
        process.join(PATIENCE)
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        process = start(folder, resume=True)
    finish(process)
    return kills


def test_a_killed_run_goes_on_bit_for_bit(tmp_path, uninterrupted):
    """One that collects ahead; the next test kills one that does not."""
    expected, seconds = uninterrupted(1)
    delay = float(np.random.default_rng(1).uniform(0.1, 0.8)) * seconds
    assert kill_and_resume(tmp_path / "run", [delay], ahead=1) == 1
    assert_same(result(tmp_path / "run"), expected)


def test_a_run_killed_while_it_writes_a_checkpoint(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    # Five files and the folder a checkpoint: inside the third one.
    finish(start(folder, kill_in_save=15, ahead=0), -signal.SIGKILL)
    assert [p.name for p in RunDir(folder).checkpoints()] == ["000000048", "000000096"]
    assert list((folder / "checkpoints").glob(".*.draft"))
    finish(start(folder, resume=True))
    assert not list((folder / "checkpoints").glob(".*"))
    assert_same(result(folder), uninterrupted(0)[0])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_run_killed_twice_goes_on_bit_for_bit(tmp_path, uninterrupted, seed):
    """Ten runs, two kills each at moments that nobody chose."""
    ahead = seed % 2
    expected, seconds = uninterrupted(ahead)
    delays = np.random.default_rng(seed).uniform(0.0, 0.5, 2) * seconds
    assert kill_and_resume(tmp_path / "run", delays.tolist(), ahead) == 2
    assert_same(result(tmp_path / "run"), expected)


def test_a_run_that_collects_ahead_goes_on_to_a_longer_limit(tmp_path: Path) -> None:
    settings = {**TINY, "ahead": 1, "total_timesteps": 200, "eval_every": 0, "eval_states": 0}
    train_td3(TD3RunConfig(run_dir=tmp_path / "whole", **settings))
    train_td3(TD3RunConfig(run_dir=tmp_path / "part", **{**settings, "total_timesteps": 112}))
    # Only what training does not depend on may change.
    with pytest.raises(ConfigError, match="not 7"):
        train_td3(TD3RunConfig(resume=tmp_path / "part", **{**settings, "batch_size": 7}))
    run = train_td3(TD3RunConfig(resume=tmp_path / "part", **settings))
    assert run.card["results"]["training"]["chunks"] == 208  # whole blocks of 2 x 8
    first, second = (tmp_path / name / "last.safetensors" for name in ("whole", "part"))
    assert first.read_bytes() == second.read_bytes()


def test_one_process_a_run_directory(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with run.lock(), pytest.raises(ConfigError, match="Another process"), run.lock():
        raise AssertionError
    with run.lock():
        pass


def test_checkpoints_are_whole_and_the_newest_stay(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for number in (10, 9_999, 10_000, 123_456):
        with run.new_checkpoint(number, keep=2) as folder:
            (folder / "file").write_text(str(number))
    assert [(p / "file").read_text() for p in run.checkpoints()] == ["10000", "123456"]
    with pytest.raises(RuntimeError), run.new_checkpoint(200_000, keep=2) as folder:
        (folder / "file").write_text("half")
        raise RuntimeError
    assert len(run.checkpoints()) == 2
    assert len(list(run.checkpoint_dir.iterdir())) == 2
    with run.new_checkpoint(123_456, keep=2) as folder:  # written again after resuming
        (folder / "file").write_text("again")
    assert [(p / "file").read_text() for p in run.checkpoints()] == ["10000", "again"]


def test_one_that_is_written_again_is_replaced_before_the_old_one_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting takes long, and may be killed; what it leaves is in nobody's way."""

    def write(text: str) -> None:
        with run.new_checkpoint(7, keep=1) as folder:
            (folder / "file").write_text(text)

    run, rmtree = RunDir(tmp_path), shutil.rmtree
    write("old")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed_over_the_old)
        with pytest.raises(KeyboardInterrupt):
            write("new")
    assert [(p / "file").read_text() for p in run.checkpoints()] == ["new"]
    assert rmtree is shutil.rmtree and len(list(run.checkpoint_dir.iterdir())) == 2
    write("newest")
    assert [p.name for p in run.checkpoint_dir.iterdir()] == ["000000007"]


def killed_over_the_old(path: Path, **_: object) -> None:
    if (path / "file").is_file() and (path / "file").read_text() == "old":
        raise KeyboardInterrupt


def test_the_best_policy_is_that_of_the_run(tmp_path: Path) -> None:
    """Not of an earlier run in the folder, nor of a continuation that was dropped."""
    run = RunDir(tmp_path)
    run.best.write_text("of step 10")
    with run.new_checkpoint(10, keep=3) as folder:
        run.keep_best(folder)
    run.best.unlink()  # as who replaces it does: the checkpoint keeps the old one
    run.best.write_text("of step 20")
    with run.new_checkpoint(20, keep=3) as folder:
        run.keep_best(folder)
    first, second = run.checkpoints()
    (run.path / "vla").mkdir()
    products = [run.card, run.policy, run.last, run.path / "vla"]
    for product in products[:3]:
        product.write_text("of step 20")
    run.go_back_to(second)
    assert run.best.read_text() == "of step 20" and run.checkpoints() == [first, second]
    assert all(product.exists() for product in products)
    run.go_back_to(first)
    assert run.best.read_text() == "of step 10" and run.checkpoints() == [first]
    assert not any(product.exists() for product in products)

    settings = {**TINY, "total_timesteps": 80, "eval_every": 0, "eval_states": 0}
    other = RunDir(tmp_path / "other")
    other.path.mkdir()
    other.best.write_text("of a run that died before its first checkpoint")
    train_td3(TD3RunConfig(run_dir=other.path, **settings))
    assert not other.best.exists()
    assert other.policy.read_bytes() == other.last.read_bytes()


def test_metrics_are_cut_back_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"

    def write(logger: RunLogger, step: int, **values: Any) -> RunLogger:
        for key, value in values.items():
            logger.record(key, value)
        logger.dump(step)
        return logger

    first = RunLogger(path, tmp_path / "tb")
    write(first, 5, c=3, a=np.float32(1.5), b=float("nan"), figure=object())
    first.record_mean("mean", float("nan"))
    kept = first.state(5)
    write(first, 6, a=2.0).close()
    path.write_bytes(path.read_bytes() + b'{"step": 7, "a"')  # killed while writing
    assert [row["step"] for row in read_rows(path)] == [5, 6]
    again = RunLogger(path, tmp_path / "tb", kept)
    again.record_mean("mean", 1.0)  # of this and what is no number
    write(again, 6, a=4.0).close()
    assert rows_without_times(path) == [
        {"step": 5, "a": 1.5, "b": None, "c": 3},
        {"step": 6, "a": 4.0, "mean": None},
    ]


def test_a_checkpoint_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    config = TD3RunConfig(**TINY)
    env = make_toy_vec(config)
    save_checkpoint(tmp_path, build_model(config, env).learn(16), {})
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = whole["loop.pkl"].replace(b"vla_gym.vector", b"vla_gym.vanish")
    assert other != whole["loop.pkl"]  # it names classes of the package
    for name, content in (
        ("model.zip", whole["model.zip"][:-500]),
        ("replay.pkl", whole["replay.pkl"][:-500]),
        ("loop.pkl", other),  # of a version whose classes are elsewhere
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match="is no whole checkpoint of this version"):
            load_checkpoint(tmp_path, make_toy_vec(config))
        (tmp_path / name).write_bytes(whole[name])
    loop = pickle.loads(whole["loop.pkl"])
    (tmp_path / "loop.pkl").write_bytes(pickle.dumps({**loop, "format": 0}))
    with pytest.raises(WeightsError, match="has format 0, expected .* begin a new run"):
        load_checkpoint(tmp_path, make_toy_vec(config))
    (tmp_path / "loop.pkl").write_bytes(whole["loop.pkl"])
    load_checkpoint(tmp_path, make_toy_vec(config))
