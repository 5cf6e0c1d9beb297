"""`vla-gym bench`: the arithmetic of its report, its child processes, whole small runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from vla_gym.cli import main as cli
from vla_gym.cli.bench import BenchConfig, procfs, report, results, run, tables
from vla_gym.cli.bench.actions import FixedActions
from vla_gym.cli.bench.drivers import in_chunks
from vla_gym.cli.bench.host_process import BenchError, HostProcess
from vla_gym.cli.bench.measure import Measurement
from vla_gym.cli.bench.plan import scenarios
from vla_gym.cli.bench.profiled import split_of
from vla_gym.cli.bench.spec import Contender, EnvSpec, Scenario, Target
from vla_gym.errors import AssetError, ConfigError

ROOT = Path(__file__).resolve().parents[2]
STATE = EnvSpec("goal", (8,), "lite", 0, None, 2)
THREADS = {"OMP_NUM_THREADS": "1", "LP_NUM_THREADS": "0"}


def contender(system: str = "ours", num_envs: int = 2, workers: int = 2, **changes) -> Contender:
    fields = {"key": system, "label": system, "env": STATE, **changes}
    return Contender(system=system, num_envs=num_envs, workers=workers, **fields)


# The arithmetic


def test_a_round_counts_steps_seconds_and_cpu_time_over_all_plays():
    plays = [
        {"steps": 10, "seconds": 2.0, "cpu_s": 0.5, "ended": 0},
        {"steps": 30, "seconds": 3.0, "cpu_s": 0.3, "ended": 1},
    ]
    figures = results.speed_round(plays, chunk_len=4)
    assert figures == {"rate": 8.0, "chunk_rate": 2.0, "cpu_ms": 20.0, "ended": 1.0}


def test_ratios_are_medians_of_rounds_that_ran_beside_each_other():
    scenario = Scenario(
        "s",
        "title",
        "speed",
        (contender("ours"), contender("libero"), contender("async")),
        targets=(
            Target("fast", ("ratios", "ours", "libero", "rate"), 4.0),
            Target("too fast", ("ratios", "ours", "libero", "rate"), 4.1),
            Target("slow", ("ratios", "ours", "libero", "rate"), 4.0, at_most=True),
            Target("size", ("contenders", "ours", "pss_mb"), 1.0),
            Target("absent", ("ratios", "ours", "reference", "rate"), 1.0),
        ),
    )
    rounds = {
        # The machine became slower; the medians' ratio would be 60 / 20 = 3.
        "ours": [{"rate": 100.0}, {"rate": 60.0}, {"rate": 20.0}],
        "libero": [{"rate": 20.0}, {"rate": 15.0}, {"rate": 25.0}],
        "async": [],
    }
    summary = results.summarise(scenario, rounds, {"async": "async: broken"})
    assert summary["ratios"]["ours"]["libero"]["rate"] == {"median": 4.0, "low": 0.8, "high": 5.0}
    assert summary["contenders"]["ours"]["rate"] == {"median": 60.0, "low": 20.0, "high": 100.0}
    assert list(summary["contenders"]) == ["ours", "libero"]
    assert [t["met"] for t in summary["targets"]] == [True, False, True, None, None]
    assert summary["targets"][0]["value"] == 4.0
    assert summary["failed"] == {"async": "async: broken"}


def test_the_split_of_time_is_that_of_the_slowest_worker_and_adds_up():
    # Environments 0 and 1 in worker 0, 2 in worker 1; two calls.
    rows = np.array(
        [
            [[3.0, 1.0, 1.0], [1.0, 0.5, 0.25]],
            [[2.0, 1.0, 0.5], [1.0, 0.5, 0.25]],
            [[4.0, 2.0, 1.0], [6.0, 4.0, 1.5]],
        ]
    )
    split = split_of(np.array([5.5, 7.0]), rows, np.array([0, 0, 1]))
    # Call 1: worker 0 took 5 of 5.5 s; call 2: worker 1 took 6 of 7.
    assert split == {
        "physics": 2.0 + 4.0,
        "render": 1.5 + 1.5,
        "python": (5.0 - 3.5) + (6.0 - 5.5),
        "between": 0.5 + 1.0,
    }
    assert sum(split.values()) == 12.5


def test_actions_of_an_environment_do_not_depend_on_how_many_there_are(tmp_path):
    actions = FixedActions(3)
    few, many = actions.batch(2, 24), actions.batch(5, 24)
    np.testing.assert_array_equal(few, many[:2])
    assert few.dtype == np.float32
    assert np.abs(many).max() <= 0.6
    assert not (many[0] == many[1]).any()
    assert FixedActions(3).sha256 == actions.sha256 != FixedActions(4).sha256
    chunks = in_chunks(few, 8)
    assert chunks.shape == (3, 2, 8, 7)
    np.testing.assert_array_equal(chunks[1, 0], few[0, 8:16])

    file = tmp_path / "actions.npz"
    rows = np.linspace(-1, 1, 3 * 7, dtype=np.float32).reshape(3, 7)
    np.savez(file, actions=rows)
    np.testing.assert_array_equal(FixedActions(0, file).batch(2, 4)[1], rows[[0, 1, 2, 0]])
    np.savez(file, actions=2 * rows)
    with pytest.raises(ConfigError, match="in \\[-1, 1\\]"):
        FixedActions(0, file)
    np.savez(file, moves=rows)
    with pytest.raises(ConfigError, match="array 'actions'"):
        FixedActions(0, file)


# What is compared with what


def test_every_system_has_the_same_number_of_workers():
    config = BenchConfig(workers=3, measure=("speed", "startup", "scaling", "overhead"))
    for scenario in scenarios(config, "lite"):
        for found in scenario.contenders:
            if scenario.key != "overhead":
                assert found.workers == 3, found
                assert found.num_envs == (12 if found.key == "ours-many" else 3)
    assert config.thread_environment()["LP_NUM_THREADS"] == "0"


def test_full_asks_for_every_figure_and_quick_needs_nothing_downloaded():
    full = scenarios(BenchConfig(preset="full", workers=2), "lite")
    targets = {(s.key, t.goal, t.at_most) for s in full for t in s.targets}
    assert targets == {
        ("libero-256", 20.0, False),
        ("lite-128", 100.0, False),
        ("state", 3.5, False),
        ("startup-libero", 550.0, True),
        ("startup-lite", 150.0, True),
        ("startup-10x16", 0.1, True),
        ("scaling-libero", 0.95, False),
        ("scaling-lite", 0.95, False),
        ("overhead", 200.0, True),
    }
    many = next(s for s in full if s.key == "startup-10x16")
    assert [c.num_envs for c in many.contenders] == [16, 16]
    assert {many.contenders[0].env.task_of(i) for i in range(16)} == set(range(10))
    quick = scenarios(BenchConfig(preset="quick"), "libero")
    assert {c.env.assets for s in quick for c in s.contenders} == {"lite"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"workers": 4, "num_envs": 2}, "at least the number of workers, 4"),
        ({"preset": "full", "image_size": 64, "assets": "lite"}, "fixes assets, image_size"),
        ({"systems": ()}, "at least one"),
        ({"image_size": -1}, "not be negative"),
        ({"task_ids": (10,)}, "task_id 10 is out of range"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BenchConfig(**options)


def test_without_the_real_pack_the_report_says_so_and_the_rest_is_measured(monkeypatch):
    def absent():
        raise AssetError("no libero pack here")

    asked = []

    def remember(_, scenario, advance):
        asked.append(scenario)

    monkeypatch.setattr("vla_gym.assets.pack._libero_pack", absent)
    monkeypatch.setattr(Measurement, "run", remember)
    found = run.measure(BenchConfig(preset="full", workers=2))
    keys = {s.key: s for s in asked}
    assert set(keys) == {
        *("lite-128", "state", "startup-lite", "scaling-lite"),
        *("overhead", "profile-lite", "profile-state"),
    }
    assert "reference" not in {c.key for c in keys["lite-128"].contenders}
    assert {c.env.assets for c in keys["state"].contenders} == {"lite"}
    assert any("no libero pack here" in note for note in found["notes"])
    with pytest.raises(AssetError, match="/nonexistent"):
        run.measure(BenchConfig(assets="/nonexistent"))


# Child processes


def test_a_process_tree_holds_grandchildren_and_dies_as_a_whole():
    # The grandchild leaves the session, and a sibling outlives its parent in it.
    code = (
        "import subprocess, time\n"
        "while time.process_time() < 0.1: pass\n"  # a start may take less than a tick of the clock
        "subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "subprocess.Popen(['sh', '-c', 'sleep 61 & sleep 0.2'])\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        child.stdout.readline()
        time.sleep(0.5)
        tree = procfs.process_tree(child.pid)
        assert len(tree) >= 3
        assert all(process.alive() for process in tree if process.pid == child.pid)
        assert procfs.cpu_seconds(tree) > 0
        assert 1 < procfs.pss_mb(child.pid) < 500
        assert procfs.kill_all(tree) == []
        assert not any(process.alive() for process in tree)


def test_a_host_that_dies_is_noticed_at_once_though_its_children_hold_the_pipe():
    with ExitStack() as stack:
        host = HostProcess(contender("stub-async"), THREADS)
        stack.callback(host.kill)
        host.wait_started(60)
        tree = procfs.process_tree(host._process.pid)
        assert len(tree) >= 3
        # The workers stop, so that the call hangs and they do not leave with their parent.
        for pid in host.call("worker_pids"):
            os.kill(pid, signal.SIGSTOP)
        host.send("play", np.zeros((2, 4, 7), np.float32))
        with pytest.raises(BenchError, match="no answer to 'play' within 0 s"):
            host.receive(0.3)
        os.kill(host._process.pid, signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(BenchError, match="process died during 'play'"):
            host.receive(60)
        assert time.monotonic() - begin < 5
    assert not any(process.alive() for process in tree)


def test_a_system_that_cannot_be_built_says_why_in_one_line():
    broken = contender("single", env=EnvSpec("goal", (8,), "/nonexistent", 0, None, 2))
    with ExitStack() as stack, pytest.raises(BenchError) as failure:
        host = HostProcess(broken, THREADS)
        stack.callback(host.kill)
        host.wait_started()
    message = str(failure.value)
    assert message.startswith("single: ")
    assert "/nonexistent" in message
    assert "\n" not in message


def test_a_failing_system_is_reported_and_the_others_go_on(monkeypatch):
    bad = EnvSpec("goal", (8,), "/nonexistent", 0, None, 2)
    scenario = Scenario(
        "s", "title", "speed", (contender("single"), contender("ours", env=bad)), chunks=1
    )
    seen = []
    measurement = Measurement(1, FixedActions(0), THREADS)
    summary = measurement.run(scenario, seen.append)
    assert list(summary["contenders"]) == ["single"]
    assert "/nonexistent" in summary["failed"]["ours"]
    figures = summary["contenders"]["single"]["rounds"][0]
    assert figures["rate"] > 0
    assert figures["ended"] == 0
    assert len(seen) == measurement.count_of(scenario)


def test_systems_take_turns_and_the_first_round_does_not_count(monkeypatch):
    log = []

    class FakeHost:
        seconds = {"libero": 2.0, "ours": 0.3}

        def __init__(self, contender, environ):
            assert environ is THREADS
            self.contender, self.start_s = contender, 1.0
            self._cpu_s = 0.0

        def wait_started(self):
            log.append((self.contender.key, "start"))

        def call(self, name, *arguments):
            key = self.contender.key
            log.append((key, name))
            if name == "reset":
                return {"settled_s": 0.5 + arguments[0]}
            if name == "reset_one":
                return 0.25
            self._cpu_s += 0.16
            ended = int(key == "ours" and len(log) > 20)
            assert arguments[0].shape == (2, 2, 7)
            return {"seconds": self.seconds[key], "steps": 4, "calls": 1, "ended": ended}

        def cpu_s(self):
            return self._cpu_s

        def close(self):
            log.append((self.contender.key, "close"))

        def kill(self):
            pass

    monkeypatch.setattr("vla_gym.cli.bench.measure.HostProcess", FakeHost)
    scenario = Scenario("s", "t", "speed", (contender("ours"), contender("libero")), chunks=1)
    summary = Measurement(2, FixedActions(0), THREADS).run(scenario)
    ours, libero = summary["contenders"]["ours"], summary["contenders"]["libero"]
    assert [r["reset_s"] for r in ours["rounds"]] == [1.5, 2.5]  # states 1 and 2, not 0
    assert ours["rate"]["median"] == pytest.approx(4 / 0.3)
    assert libero["cpu_ms"]["median"] == pytest.approx(40.0)
    assert summary["ratios"]["ours"]["libero"]["rate"]["median"] == pytest.approx(2 / 0.3)
    turn = ["reset_one", "reset", "play"]
    fast = [*turn, *3 * ["reset", "play"]]  # four plays of 0.3 s fill a second
    expected = [("ours", "start"), ("libero", "start")]
    for number in range(3):
        expected += [("ours", name) for name in (turn if number == 0 else fast)]
        expected += [("libero", name) for name in turn]
    assert log == [*expected, ("ours", "close"), ("libero", "close")]
    # All four of the last round, by the fake's rule.
    assert summary["notes"] == ["ours: 4 episodes ended meanwhile."]


def test_what_does_not_fit_into_memory_is_started_in_groups(monkeypatch):
    measurement = Measurement(1, FixedActions(0), THREADS)
    monkeypatch.setattr("vla_gym.cli.bench.measure.available_memory_mb", lambda: 15_000.0)
    many = contender("libero", 16, 16, env=EnvSpec("goal", (3, 4, 5), "lite", 256, None, 8))
    groups = measurement._fitting_groups(many)
    assert [g.num_envs for g in groups] == [6, 6, 4]
    played = [g.env.task_of(i) for g in groups for i in range(g.num_envs)]
    assert played == [many.env.task_of(i) for i in range(16)]
    assert measurement._fitting_groups(contender("ours", 16)) == [contender("ours", 16)]


# Whole runs


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> tuple[dict, Path]:
    """A whole run without images beside AsyncVectorEnv, and its JSON file."""
    path = tmp_path_factory.mktemp("bench") / "report.json"
    arguments = ["--assets", "lite", "--image-size", "0", "--rounds", "2", "--workers", "2"]
    arguments += ["--systems", "ours", "async", "--measure", "speed", "--chunks", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vla_gym.cli.bench.measure.WINDOW_S", 0.05)
        assert cli.main(["bench", *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text()), path


def test_a_run_measures_speed_and_resets(small):
    found, _ = small
    (speed,) = found["scenarios"]
    assert list(speed["contenders"]) == ["ours", "ours-many", "async"]
    for key, envs in (("ours", 2), ("ours-many", 8), ("async", 2)):
        figures = speed["contenders"][key]
        assert figures["num_envs"] == envs
        assert len(figures["rounds"]) == 2
        assert figures["rate"]["median"] == pytest.approx(8 * figures["chunk_rate"]["median"])
        assert 0 < figures["reset_one_s"]["median"] < 30
        assert figures["ended"]["high"] == 0
    assert not speed["failed"] and not speed["notes"]
    assert found["machine"]["gl"]
    assert found["versions"]["mujoco"].startswith("3.3")
    assert "--systems ours async" in found["command"]
    assert "--json" not in found["command"]


def test_start_memory_overhead_and_split_of_ours(monkeypatch):
    monkeypatch.setattr("vla_gym.cli.bench.measure.WINDOW_S", 0.05)
    found = run.measure(
        BenchConfig(
            assets="lite",
            image_size=16,
            workers=2,
            num_envs=2,
            rounds=1,
            systems=("ours",),
            measure=("startup", "overhead"),
            profile=True,
        )
    )
    startup, overhead, profile = found["scenarios"]
    (ours,) = startup["contenders"].values()
    # Python and MuJoCo alone take 20 MB; a worker on the lite pack is asked to stay below 150.
    assert 20 < ours["pss_mb"]["median"] < 250
    assert ours["all_mb"]["median"] > 2 * ours["pss_mb"]["median"]
    assert ours["start_s"]["median"] > ours["start_cpu_s"]["median"] / 3 > 0
    stub = overhead["contenders"]["stub-ours-0"]
    assert stub["beyond_envs_us"]["median"] > stub["overhead_us"]["median"] > 0
    assert overhead["targets"][0]["value"] == stub["overhead_us"]["median"]
    parts = profile["contenders"]["profiled"]
    for name in ("physics", "render", "python", "between"):
        assert parts[f"{name}_ms"]["median"] > 0, name
    # One render of two tiny images against eight control steps of 50 ms each.
    assert parts["physics_ms"]["median"] > parts["python_ms"]["median"]
    calls_s = 1 / (parts["chunk_rate"]["median"] / 2)
    split_s = sum(parts[f"{name}_ms"]["median"] for name in ("physics", "render", "python"))
    split_s = (split_s + parts["between_ms"]["median"]) / 1e3
    assert split_s == pytest.approx(calls_s, rel=0.02)
    assert not any(scenario["failed"] for scenario in found["scenarios"])


def test_a_report_is_shown_again_and_written_into_a_page(small, tmp_path, capsys):
    found, path = small
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{report.BEGIN}\nold\n{report.END}\n\nThe end.\n")
    assert cli.main(["bench", "--show", str(path), "--page", str(page)]) == 0
    assert "Reset to a settled official state" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("# Title\n\n")
    assert text.endswith("\n\nThe end.\n")
    assert "old" not in text
    assert report.markdown(found) in text
    assert text.count("### ") == len(tables.tables(found)) == 2
    report.write_page(found, page)
    assert page.read_text() == text

    page.write_text("no markers")
    assert cli.main(["bench", "--show", str(path), "--page", str(page)]) == 2
    assert "bench: begin" in capsys.readouterr().err
    page.write_text("{}")
    assert cli.main(["bench", "--show", str(page)]) == 2
    assert "expected a report of vla-gym bench" in capsys.readouterr().err


def test_the_performance_page_shows_its_report():
    """Nobody types a figure: `vla-gym bench --show docs/performance.json --page ...` writes it."""
    found = report.load_report(ROOT / "docs" / "performance.json")
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"{report.BEGIN}\n\n{report.markdown(found)}\n{report.END}" in text


def test_ctrl_c_ends_every_process(tmp_path):
    command = [sys.executable, "-m", "vla_gym.cli.main", "bench", "--measure", "speed"]
    command += ["--assets", "lite", "--image-size", "0", "--rounds", "500"]
    with subprocess.Popen(
        [*command, "--systems", "ours", "async", "--workers", "2"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as bench:
        try:
            # Three hosts, two of ours with a server and two workers each, AsyncVectorEnv's two.
            tree: list[procfs.Process] = []
            deadline = time.monotonic() + 120
            while len(tree) < 1 + 3 + 2 * 3 + 2:
                assert time.monotonic() < deadline, f"only {len(tree)} processes"
                assert bench.poll() is None, bench.stderr.read()
                time.sleep(0.2)
                tree = procfs.process_tree(bench.pid)
            os.kill(bench.pid, signal.SIGINT)
            _, errors = bench.communicate(timeout=60)
        finally:
            procfs.kill_all(procfs.process_tree(bench.pid))
    assert bench.returncode == 130, errors
    assert "Interrupted" in errors
    assert not [process.pid for process in tree if process.alive()]


@pytest.mark.slow
def test_upstream_plays_the_same_actions(tmp_path):
    """LIBERO's own vector environment, with cameras and without, beside ours."""
    path = tmp_path / "report.json"
    common = ["--assets", "lite", "--rounds", "1", "--chunks", "1", "--workers", "1"]
    for size in ("0", "32"):
        arguments = [*common, "--image-size", size, "--systems", "ours", "libero"]
        assert cli.main(["bench", *arguments, "--json", str(path)]) == 0
        speed, startup = json.loads(path.read_text())["scenarios"]
        assert not speed["failed"] and not startup["failed"]
        upstream = speed["contenders"]["libero"]
        assert upstream["ended"]["high"] == 0
        assert upstream["reset_s"]["median"] > upstream["reset_plain_s"]["median"] > 0
        assert speed["ratios"]["ours"]["libero"]["rate"]["median"] > 1
        assert startup["ratios"]["ours"]["libero"]["pss_mb"]["median"] < 1
