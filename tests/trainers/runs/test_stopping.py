"""Ctrl-C and SIGTERM: where a run ends, what it says, and that it goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from resume_target import tiny_arguments, use_toy

import vla_gym_trainers.td3.train as train_td3_module
from vla_gym_trainers.cli import main
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.stopping import StopRequest, stoppable

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Whatever happens, the test process keeps its own handlers."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    after = [signal.getsignal(number) for number in SIGNALS]
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)
    assert after == before


def test_the_second_signal_does_not_wait(tmp_path: Path) -> None:
    done = []
    with (
        pytest.raises(KeyboardInterrupt, match="--resume"),
        stoppable(RunDir(tmp_path), "grpo") as request,
        request.deferred(),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("first")
        os.kill(os.getpid(), signal.SIGINT)
        done.append("second")
    assert done == ["first"]


def test_outside_of_the_block_a_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt, match="--resume"),
        stoppable(RunDir(tmp_path), "ppo") as request,
    ):
        with request.deferred():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError


def test_an_error_is_not_hidden_by_a_request() -> None:
    request = StopRequest()
    with pytest.raises(ValueError, match="broken"), request.deferred():
        request.handle()
        raise ValueError("broken")


def test_other_threads_leave_signals_alone(tmp_path: Path) -> None:
    seen: list[Any] = []

    def work() -> None:
        with stoppable(RunDir(tmp_path), "td3"):
            seen.append([signal.getsignal(number) for number in SIGNALS])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert seen == [[signal.getsignal(number) for number in SIGNALS]]


class Interrupted(train_td3_module.RunCallback):
    """Sends the process SIGINT when 100 chunks are collected."""

    def _on_step(self) -> bool:
        if self.num_timesteps == 100:
            os.kill(os.getpid(), signal.SIGINT)
        return super()._on_step()


def test_a_stopped_run_goes_on(tmp_path, monkeypatch, capsys):
    """One that collects ahead; one that does not is a case of the same (test_run.py)."""
    use_toy(monkeypatch)
    arguments = ["--run-dir", str(tmp_path), *tiny_arguments(checkpoint_every=10_000, ahead=3)]
    with monkeypatch.context() as patch:
        patch.setattr(train_td3_module, "RunCallback", Interrupted)
        assert main(["td3", *arguments]) == 130
    assert f"Go on with: vla-gym-train td3 --resume {tmp_path}" in capsys.readouterr().err
    (stopped,) = RunDir(tmp_path).checkpoints()
    assert 100 <= int(stopped.name) < 240
    assert not (tmp_path / "card.json").exists()
    # Without more training it only ends: its policy is there.
    assert main(["td3", "--resume", str(tmp_path), "--max-minutes", "0"]) == 0
    assert (tmp_path / "card.json").exists() and (tmp_path / "policy.safetensors").exists()
    assert RunDir(tmp_path).checkpoints() == [stopped]
    assert main(["td3", "--resume", str(tmp_path), "--max-minutes", "None"]) == 0
    assert int(RunDir(tmp_path).checkpoints()[-1].name) == 240
