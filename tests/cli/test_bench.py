"""`vla-gym bench`: its arithmetic, its child processes, a small run beside AsyncVectorEnv."""

import json
import os
import signal
import time
import venv
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from vla_gym.cli import main as cli
from vla_gym.cli.bench import compare, peer_venvs
from vla_gym.cli.bench import config as bench_config
from vla_gym.cli.bench.config import BenchConfig, SystemSpec, system_specs
from vla_gym.cli.bench.measuring import cpu_seconds, pss_mb, session_pids
from vla_gym.cli.bench.processes import Child
from vla_gym.errors import BenchError, ConfigError
from vla_gym.files import only_process
from vla_gym.suites import get_suite

SPEC = SystemSpec(
    "ours", "ours", 2, BenchConfig(workers=2, assets="lite", image_size=0, chunk_len=2)
)


def test_ratios_are_medians_of_rounds_that_ran_beside_each_other():
    ours = [{"rate": 100.0, "ended": 0.0}, {"rate": 60.0}, {"rate": 20.0}]
    libero = [{"rate": 20.0, "ended": 0.0}, {"rate": 15.0}, {"rate": 25.0}]
    # The machine became slower; the medians' ratio would be 60 / 20 = 3.
    assert compare.ratios(ours, libero) == {"rate": {"median": 4.0, "low": 0.8, "high": 5.0}}
    assert compare.ratios(ours, []) == {}


def test_actions_of_an_environment_do_not_depend_on_how_many_there_are():
    few, many = compare.fixed_actions(3, 2, 24, 7), compare.fixed_actions(3, 5, 24, 7)
    np.testing.assert_array_equal(few, many[:2])
    assert few.dtype == np.float32 and few.shape == (2, 24, 7)
    assert np.abs(many).max() <= 0.6 and not (many[0] == many[1]).any()


def test_every_system_has_the_same_number_of_workers():
    specs = system_specs(BenchConfig(workers=3, task_ids=(8, 9)))
    assert [(spec.system, spec.num_envs) for spec in specs] == [
        *(("ours", 3), ("ours", 12)),
        *(("libero", 3), ("async", 3)),
    ]
    assert [specs[1].task_of(i) for i in range(4)] == [8, 9, 8, 9]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 4, "num_envs": 2}, "at least the number of workers, 4"),
        ({"systems": ()}, "at least one"),
        ({"image_size": -1}, "image_size: expected `int` >= 0, got -1"),
        ({"peers": (), "image_size": 0}, "image_size must be at least 1"),
        ({"peers": (), "suite": "goal-swap"}, "LIBERO's suites goal, spatial"),
        ({"json": Path("nowhere/report.json")}, "its folder does not exist"),
        ({"json": Path()}, "is a folder: expected the name of a file"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BenchConfig(**options)


def test_a_suite_without_official_states_is_refused(monkeypatch):
    monkeypatch.setattr(get_suite("goal"), "num_init_states", 0)
    with pytest.raises(ConfigError, match="no official states"):
        BenchConfig()


def test_peers_are_further_systems_all_of_them_if_none_is_named():
    specs = system_specs(BenchConfig(workers=2, num_envs=2, systems=("ours",), peers=()))
    names = ["ours", "RLinf's", "TorchRL's", "LeRobot's", "libero2gym's"]
    assert [spec.name for spec in specs] == names
    assert [spec.is_peer for spec in specs] == [False, True, True, True, True]
    chosen = BenchConfig(systems=("ours",), peers=("torchrl",))
    assert [spec.system for spec in system_specs(chosen)][-1] == "torchrl"


def test_systems_take_turns_the_first_round_does_not_count_and_failures_stop_nobody(
    monkeypatch, capfd
):
    log = []

    class FakeChild:
        start_s = 1.5

        def __init__(self, spec):
            self.spec = spec
            log.append((spec.system, "start"))

        def call(self, _name, state, states, actions, _window_s):
            log.append((self.spec.system, state))
            if self.spec.system == "async" and state == 1:
                raise BenchError("async: it broke")
            assert (states is not None) is (self.spec.system == "libero")
            assert states is None or len({len(state) for state in states}) == 2
            assert actions.shape == (2, 16, 7)
            rate = {"ours": 30.0, "libero": 10.0, "async": 20.0}[self.spec.system]
            return {"steps_per_s": rate * (state + 1), "ended": 0.0}

        def memory(self):
            return {"worker_mb": 100.0, "all_mb": 300.0}

        def close(self):
            log.append((self.spec.system, "close"))

    def load(task, _):  # states of two scenes have different sizes
        return SimpleNamespace(init_states=np.zeros((50, 60 + task.task_id)))

    monkeypatch.setattr(compare, "Child", FakeChild)
    monkeypatch.setattr(compare, "machine", dict)
    monkeypatch.setattr("vla_gym.suites.libero.load_task_model", load)
    tasks = {"task_ids": (8, 9), "assets": "lite"}
    config = BenchConfig(**tasks, workers=2, num_envs=2, rounds=2, starts=1)
    report = compare.measure(config)
    said = capfd.readouterr().err
    assert "round 2, ours: 90.0 control steps/s" in said
    assert "Gymnasium's: async: it broke" in said
    systems = ("ours", "libero", "async")
    starts = [(system, what) for system in systems for what in ("start", 0, "close")]
    warm_up = [(system, what) for system in systems for what in ("start", 0)]
    first = [("ours", 1), ("libero", 1), ("async", 1), ("async", "close")]
    assert log[: len(starts) + 10] == [*starts, *warm_up, *first]
    assert log[len(starts) + 10 :][:2] == [("ours", 2), ("libero", 2)]
    assert report["failed"] == {"Gymnasium's": "async: it broke"}
    assert report["baseline"] == "LIBERO's"
    assert report["systems"]["ours"]["steps_per_s"]["median"] == 75.0  # of 60 and 90
    assert report["systems"]["ours"]["start_s"]["median"] == 1.5
    assert report["ratios"]["ours"]["steps_per_s"] == {"median": 3.0, "low": 3.0, "high": 3.0}
    assert report["ratios"]["ours"]["worker_mb"]["median"] == 1.0


def test_a_child_holds_one_system_and_ends_with_all_its_processes():
    with closing(Child(SPEC)) as child:
        pids = session_pids(child.pid)
        assert len(pids) >= 3
        assert cpu_seconds(pids) > 0 and 1 < pss_mb(pids[0]) < 1000
        actions = compare.fixed_actions(0, 2, 4, 7)
        figures = child.call("measure", 0, None, actions, 1e-9)
        assert figures["steps_per_s"] == pytest.approx(2 * figures["chunks_per_s"])
        assert figures["reset_s"] > 0 and figures["ended"] == 0
        memory = child.memory()
        assert 20 < memory["worker_mb"] < memory["all_mb"]
        with pytest.raises(BenchError, match="'measure' failed"):
            child.call("measure", 0, None, actions[:, :3], 1e-9)  # not whole chunks
        os.kill(child.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(BenchError, match="process died during 'measure'"):
            child.call("measure", 0, None, actions, 1e-9)
        assert time.monotonic() - begin < 30
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_system_that_cannot_be_built_says_why_in_one_line():
    with pytest.raises(BenchError) as failure:
        Child(replace(SPEC, config=replace(SPEC.config, assets="/nonexistent")))
    message = str(failure.value)
    assert message.startswith("ours: ") and "/nonexistent" in message and "\n" not in message


_STUB = """
import numpy as np

class LiberoGoalEnv:
    def __init__(self, dummy=False, task_id=0, image_size=0, seed=0, max_episode_steps=0):
        self.task_id, self.image_size = task_id, image_size

class AsyncVectorEnv:
    def __init__(self, env_fns, dummy_env_fn):
        self.envs, self.resets = [make() for make in env_fns], []

    def reset(self, options):
        self.resets.append([entry["init_state_id"] for entry in options])

    def step(self, actions):
        assert [env.task_id for env in self.envs] == [8, 9] and actions.shape == (2, 7)
        assert self.envs[0].image_size == 64
        return None, None, np.array([True, False]), None

    def close(self):
        pass
"""


def test_a_peer_is_measured_in_an_environment_without_vla_gym(tmp_path, monkeypatch):
    """A package of the peer's name in a bare environment stands in for it."""
    venv.create(tmp_path / "venv", with_pip=False)
    site = next(tmp_path.glob("venv/lib/python*/site-packages"))
    (site / "numpy").symlink_to(Path(np.__file__).parent)
    for libs in Path(np.__file__).parent.parent.glob("numpy.libs"):
        (site / "numpy.libs").symlink_to(libs)
    (site / "libero" / "libero").mkdir(parents=True)
    (site / "libero2gym").mkdir()
    for module in ("__init__", "libero_env", "vector_env"):
        (site / "libero2gym" / f"{module}.py").write_text(_STUB)
    made = []

    def peer_python(name, assets):
        made.append((name, (assets / "scenes").is_dir()))
        return tmp_path / "venv" / "bin" / "python"

    monkeypatch.setattr(bench_config, "peer_python", peer_python)
    config = BenchConfig(
        task_ids=(8, 9), assets="lite", image_size=64, chunk_len=2, workers=2, peers=()
    )
    with closing(Child(SystemSpec("libero2gym's", "libero2gym", 2, config))) as child:
        assert made == [("libero2gym", True)]
        figures = child.call("measure", 3, None, compare.fixed_actions(0, 2, 4, 7), 1e-9)
        assert figures["ended"] == 4 and figures["steps_per_s"] > 0
    with pytest.raises(BenchError, match="^TorchRL's: ModuleNotFoundError: No module.*torch'$"):
        Child(SystemSpec("TorchRL's", "torchrl", 2, config))


def test_a_peer_that_cannot_be_installed_says_why_in_one_line(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho 'WARNING: slow' >&2\necho 'ERROR: no such version' >&2\nexit 1\n"
    )
    python.chmod(0o755)
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path))
    monkeypatch.setattr(peer_venvs.sys, "executable", str(python))
    with pytest.raises(BenchError) as failure:
        peer_venvs.peer_python("rlinf", tmp_path)
    message = str(failure.value)
    assert message.startswith("rlinf: its environment cannot be made") and "\n" not in message
    assert message.endswith("ERROR: no such version")
    assert not (tmp_path / "peers" / "rlinf" / "stamp").exists()


def test_a_peer_that_another_process_makes_is_not_waited_for_without_end(monkeypatch, tmp_path):
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path))
    monkeypatch.setattr(peer_venvs, "_PIP_DEADLINE_S", 0.1)
    (tmp_path / "peers").mkdir()
    with only_process(tmp_path / "peers" / "rlinf.lock", ""):
        with pytest.raises(BenchError, match="^rlinf: another process is making its environment"):
            peer_venvs.peer_python("rlinf", tmp_path)


def test_a_run_beside_asyncs_writes_its_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(compare, "WINDOW_S", 0.01)
    path = tmp_path / "report.json"
    options = ["--assets", "lite", "--image-size", "0", "--rounds", "1", "--workers", "1"]
    options += ["--num-envs", "1", "--systems", "ours", "async", "--starts", "0"]
    assert cli.main(["bench", *options, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert list(report["systems"]) == ["ours", "Gymnasium's"] and not report["failed"]
    assert report["machine"]["gl"] and "mujoco 3.3" in report["machine"]["packages"]
    assert report["ratios"]["ours"]["steps_per_s"]["median"] > 0
    shown = capsys.readouterr().out
    assert "control steps/s" in shown and "Ratios to Gymnasium's" in shown


@pytest.mark.slow
def test_upstream_plays_the_same_actions(tmp_path):
    """LIBERO's own vector environment beside ours."""
    path = tmp_path / "report.json"
    options = ["--assets", "lite", "--rounds", "1", "--starts", "1", "--chunks", "1"]
    options += ["--workers", "1", "--image-size", "32", "--systems", "ours", "libero"]
    assert cli.main(["bench", *options, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert not report["failed"]
    assert report["systems"]["LIBERO's"]["ended"]["high"] == 0
    assert report["ratios"]["ours"]["steps_per_s"]["median"] > 1
    assert report["ratios"]["ours"]["worker_mb"]["median"] < 1
