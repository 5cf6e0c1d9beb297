"""The process server: what a worker gets, how it ends, and that nothing outlives the trainer."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from vector_processes import SOON as LONG
from vector_processes import alive as runs
from vector_processes import children_of, descriptors
from vector_processes import wait_until as until
from worker_targets import picture

from vla_gym.assets import resolve_asset_pack
from vla_gym.envs.scene_cache import SceneCache, load_task
from vla_gym.errors import AssetError, UnknownTaskError, VlaGymError, WorkerError
from vla_gym.sim.rendering import painter
from vla_gym.suites import get_task
from vla_gym.suites.libero.requests import scene_request
from vla_gym.suites.libero.tasks import scene_of
from vla_gym.vector.processes.client import EXIT_S, ProcessServer, ServerDied, WorkerProcess
from vla_gym.vector.processes.server import pickle_error

without_gpu = pytest.mark.skipif(painter.has_gpu(), reason="its contexts are not inherited")
ROOT = Path(__file__).resolve().parents[2]
PRELOADED_TASKS = [("goal", 7), ("goal", 8)]
DRAWING: dict[str, Any] = {"image_size": 48, "visual_profile": "libero", "max_scenes": 1}


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def until_stopped(pid: int) -> None:
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "it is stopped")


def read_all(fd: int) -> bytes:
    """Read a pipe to its end, within a deadline."""
    data, deadline = b"", time.monotonic() + LONG
    with open(fd, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (piece := pipe.read(65536)):
                return data
            data += piece
    raise AssertionError(f"the pipe was not closed within {LONG} s; got {data!r}")


def spawn(
    server: ProcessServer, target: str, payload: bytes = b"", fds: Sequence[int] = ()
) -> WorkerProcess:
    return server.spawn(f"worker_targets:{target}", payload, fds, {}, timeout=LONG)


def preload(server: ProcessServer, tasks: Any, assets: str, **named: Any) -> None:
    server.load("vla_gym.vector.preload:preload", tasks=tasks, assets=assets, **named)


def spawn_with_pipe(
    server: ProcessServer, target: str, payload: bytes = b"", **environ: str
) -> tuple[WorkerProcess, int]:
    """Fork a worker that writes into a pipe; return it and the pipe."""
    read, write = os.pipe()
    try:
        name = f"worker_targets:{target}"
        return server.spawn(name, payload, [write], environ, timeout=LONG), read
    finally:
        os.close(write)


def tell(server: ProcessServer, target: str, payload: bytes = b"", **environ: str) -> Any:
    """Run a worker to its end and return what it tells."""
    worker, pipe = spawn_with_pipe(server, target, payload, **environ)
    answer = read_all(pipe)
    assert worker.exit_code(LONG) == 0
    return json.loads(answer)


@contextlib.contextmanager
def own_server() -> Iterator[ProcessServer]:
    """A server that nobody has used before."""
    server = ProcessServer()
    server._users = 1
    try:
        yield server
    finally:
        server.release()
    assert not runs(server.pid)


@pytest.fixture
def fresh() -> Iterator[ProcessServer]:
    with own_server() as server:
        yield server


@pytest.fixture
def server(stub_server: Any) -> ProcessServer:
    """The server of all tests of this file, or the next one if a test has killed it."""
    server: ProcessServer = stub_server.current()
    return server


@pytest.fixture(scope="module")
def loaded() -> Iterator[ProcessServer]:
    """A server that has loaded a scene; tests that kill servers have another one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MUJOCO_GL", "egl")
        patch.setenv("LIBGL_ALWAYS_SOFTWARE", "1")
        server = ProcessServer()
        server._users = 1
        preload(server, PRELOADED_TASKS, "lite", timeout=300)
    yield server
    server.release()


def test_a_worker_sees_the_trainer_as_it_is_now_and_nothing_else(server, tmp_path, monkeypatch):
    sibling = spawn(server, "say_and_sleep")  # a sibling, whose descriptors nobody else may hold
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_LATER", "yes")
    monkeypatch.setenv("REPLACED", "old")
    monkeypatch.syspath_prepend(str(tmp_path / "late"))
    monkeypatch.setattr(sys, "argv", ["train.py", "--fast"])
    worker, pipe = spawn_with_pipe(server, "report", b"hello", REPLACED="new", ADDED="1")
    told = json.loads(read_all(pipe))
    assert told["payload"] == "hello"
    expected = {**os.environ, "REPLACED": "new", "ADDED": "1"}
    assert told["environ"] == expected
    assert (told["folder"], told["argv"]) == (str(tmp_path), ["train.py", "--fast"])
    assert told["path"] == sys.path
    assert told["parent"] == server.pid
    assert told["group"] == worker.pid != sibling.pid  # so that its own children can be found
    assert told["session"] == server.pid != os.getsid(0)  # no Ctrl-C reaches it
    assert told["sigint"] and told["sigterm"] and told["sigalrm"]
    assert (told["timer"], told["blocked"], told["threads"]) == (0.0, [], 1)
    (fd,) = told["fds"]
    assert set(map(int, told["open"])) == {0, 1, 2, fd}
    assert told["open"][str(fd)].startswith("pipe:") and told["inheritable"] == [False]


def test_workers_draw_different_random_numbers_and_take_many_megabytes(server):
    first, second = (tell(server, "report", bytes(size)) for size in (0, 30_000_000))
    assert all(a != b for a, b in zip(first["random"], second["random"], strict=True))
    assert second["payload"] == 30_000_000


def test_exit_codes_and_output(capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with own_server() as server:  # pytest captures a fixture's output in another file
        for target, how, code, error in (
            ("nothing", "", 1, "has no attribute 'nothing'"),
            ("leave", "return", 0, ""),
            ("leave", "exit", 3, ""),
            ("leave", "message", 1, "a last word"),
            ("leave", "raise", 1, "ValueError: thrown in a worker"),
            ("leave", "interrupt", 1, "KeyboardInterrupt"),
            ("leave", "abort", -signal.SIGABRT, "in leave"),
        ):
            worker = spawn(server, target, how.encode())
            assert worker.exit_code(LONG) == code
            assert worker.exit_code(0) == code, "an exit code can be asked for again"
            assert worker.kill(0) == code, "killing it then changes nothing"
            out, err = capfd.readouterr()
            assert ("half a line" in out) == bool(how) and error in err
            assert bool(err) == bool(error)


def test_abort_shows_where_a_worker_hangs(capfd):
    with own_server() as server:
        hanging, pipe = spawn_with_pipe(server, "spin")
        stopped = spawn(server, "say_and_sleep")
        with open(pipe, "rb") as running:
            assert running.read(1) == b"x"
        os.kill(stopped.pid, signal.SIGSTOP)
        until_stopped(stopped.pid)
        hanging.abort(LONG)
        assert hanging.exit_code(0) == -signal.SIGABRT
        stopped.abort(0.1)
        assert stopped.exit_code(0) is None
        stopped.kill(LONG)
    assert "in spin" in capfd.readouterr().err


def test_kill(server):
    sleeping, stopped = spawn(server, "say_and_sleep"), spawn(server, "say_and_sleep")
    os.kill(stopped.pid, signal.SIGSTOP)
    until_stopped(stopped.pid)
    assert sleeping.exit_code(0) is None
    began = time.monotonic()
    assert sleeping.exit_code(0.1) is None
    assert time.monotonic() - began >= 0.1
    for worker in (sleeping, stopped):
        assert worker.kill(LONG) == -signal.SIGKILL
        until(lambda pid=worker.pid: not psutil.pid_exists(pid), "it is reaped")


@pytest.mark.parametrize("how", [b"stay", b"leave"])
def test_what_a_worker_has_started_goes_with_it(server, how):
    worker, pipe = spawn_with_pipe(server, "sleep_with_child", how)
    grandchild = json.loads(read_all(pipe))
    if how == b"stay":
        assert runs(grandchild)
        assert worker.kill(LONG) == -signal.SIGKILL
    else:
        assert worker.exit_code(LONG) == 0
    until(lambda: not runs(grandchild), "the worker's child is gone")


def test_a_worker_that_nobody_holds_does_not_stay(server):
    pid = spawn(server, "say_and_sleep").pid
    until(lambda: not runs(pid), "it was killed")


def test_a_killed_server_takes_its_workers_along(server):
    fds = len(descriptors())
    first, (second, pipe) = spawn(server, "say_and_sleep"), spawn_with_pipe(server, "say_and_sleep")
    os.read(pipe, 1)  # it has begun; the kernel knows that it shall end with its parent
    os.close(pipe)
    os.kill(second.pid, signal.SIGSTOP)
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not runs(first.pid) and not runs(second.pid), "both workers are gone")
    for ask in (
        lambda: spawn(server, "leave"),
        lambda: first.exit_code(1),
        lambda: second.kill(1),
        lambda: preload(server, PRELOADED_TASKS, "lite", timeout=1),
    ):
        with pytest.raises(ServerDied, match=r"exit code -9"):
            ask()
    assert len(descriptors()) < fds


def test_acquire_replaces_a_dead_server_that_nobody_has_asked_since(server):
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: not runs(server.pid), "it is dead")
    new = ProcessServer.acquire()
    assert tell(new, "report")["parent"] == new.pid != server.pid
    new.release()


def test_a_server_that_cannot_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(WorkerError, match="/nowhere/python"):
        ProcessServer()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with own_server() as server, pytest.raises(ServerDied, match="exit code 1"):
        spawn(server, "leave")


def test_a_hanging_server_is_not_waited_for_for_ever(server):
    worker = spawn(server, "say_and_sleep")
    os.kill(server.pid, signal.SIGSTOP)
    assert worker.exit_code(0) is None
    assert worker.kill(0.1) is None
    until(lambda: not runs(worker.pid), "the worker is dead although the server did nothing")
    os.kill(server.pid, signal.SIGCONT)
    assert worker.exit_code(LONG) == -signal.SIGKILL

    other = spawn(server, "say_and_sleep")
    os.kill(server.pid, signal.SIGSTOP)
    with pytest.raises(ServerDied, match="did not answer 'spawn' within 0.2 s and was killed"):
        server.spawn("time:sleep", b"", [], {}, timeout=0.2)
    assert not psutil.pid_exists(server.pid)
    until(lambda: not runs(other.pid), "its worker is gone")


def test_a_worker_whose_spawn_was_interrupted_does_not_stay(server):
    class Interrupt(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise Interrupt

    tell(server, "report")
    before = children_of(server.pid)
    previous = signal.signal(signal.SIGUSR1, interrupt)
    os.kill(server.pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    try:
        with pytest.raises(Interrupt):
            spawn(server, "say_and_sleep")
    finally:
        signal.signal(signal.SIGUSR1, previous)
    os.kill(server.pid, signal.SIGCONT)
    assert tell(server, "report")["parent"] == server.pid
    until(lambda: children_of(server.pid) <= before, "the worker that nobody waits for is gone")


def test_threads_may_ask_at_once(server):
    codes: list[int | None] = []

    def work() -> None:
        for _ in range(4):
            codes.append(spawn(server, "say_and_sleep").kill(LONG))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    assert codes == [-signal.SIGKILL] * 24


def test_the_garbage_collector_may_close_another_env_in_the_middle_of_a_request(server):
    watched = spawn(server, "say_and_sleep")
    nested: list[int | None] = []

    def close(phase: str, _: dict[str, int]) -> None:
        if not nested and phase == "start" and server._lock._is_owned():
            nested.append(-1)  # no recursion
            nested[0] = watched.kill(LONG)
            ProcessServer.acquire().release()

    threshold = gc.get_threshold()
    gc.callbacks.append(close)
    gc.set_threshold(1, 1, 1)
    try:
        worker = spawn(server, "leave", b"quiet")
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(close)
    assert nested == [-signal.SIGKILL]
    assert worker.exit_code(LONG) == 3


# --- the end of the trainer -----------------------------------------------------------------------


def read_line(process: subprocess.Popen[str]) -> str:
    """Read a line of a trainer, byte by byte: what a buffer held, no deadline could wait for."""
    assert process.stdout is not None
    fd, line = process.stdout.fileno(), b""
    while not line.endswith(b"\n"):
        assert select.select([fd], [], [], LONG)[0], f"the trainer says nothing after {line!r}"
        piece = os.read(fd, 1)
        assert piece, f"the trainer ends after {line!r}"
        line += piece
    return line.decode()


@contextlib.contextmanager
def trainer(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a script that has no ``__main__`` guard, with the tests' folder in its sys.path."""
    preamble = f"import sys; sys.path.insert(0, {str(ROOT / 'tests' / 'helpers')!r})\n"
    command = [sys.executable, "-c", preamble + textwrap.dedent(code), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


WITH_WORKERS = """
    import ctypes, os, signal, sys, time
    from vla_gym.vector.processes.client import ProcessServer

    # What a server would inherit; none of it may matter.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGTERM])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    server = ProcessServer.acquire()
    target = "worker_targets:"
    read, write = os.pipe()
    workers = [
        server.spawn(target + name, b"", [write], {}, timeout=60)
        for name in ("say_and_sleep", "spin", "say_and_sleep")
    ]
    code = server.spawn(target + "leave", b"quiet", [], {}, timeout=60).exit_code(60)
    for _ in workers:
        os.read(read, 1)
    pids = [worker.pid for worker in workers]
    os.kill(pids[2], signal.SIGSTOP)
    forked = 0
    if sys.argv[1] == "forked":
        forked = ctypes.CDLL(None).fork()  # as C code forks: Python's fork handlers do not run
        if not forked:
            time.sleep(1000)
    print(code, forked, server.pid, *pids, flush=True)
"""


def test_a_killed_trainer_leaves_nothing_behind_though_its_fork_lives():
    code = WITH_WORKERS + "    time.sleep(1000)\n"
    with trainer(code, "forked") as process:
        exit_code, child, *pids = map(int, read_line(process).split())
        try:
            assert exit_code == 3
            assert all(map(runs, pids))
            process.kill()
            until(lambda: not any(map(runs, pids)), "server and workers are gone")
            assert runs(child), "the fork still holds the link"
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_fork_of_the_trainer_has_no_part_in_the_server(server):
    worker = spawn(server, "say_and_sleep")
    code = """
    import os, sys, worker_targets
    from vla_gym.errors import WorkerError
    from vla_gym.vector.processes.client import ProcessServer

    server = ProcessServer.acquire()
    worker = server.spawn("worker_targets:say_and_sleep", b"", [], {}, timeout=60)
    child = os.fork()
    if not child:
        try:
            worker.kill(60)
        except WorkerError as error:
            print("belongs to process" in str(error), flush=True)
        server.release()
        own = ProcessServer.acquire()
        done = own.spawn("worker_targets:leave", b"quiet", [], {}, timeout=60)
        print(own.pid != server.pid, done.exit_code(60), flush=True)
        sys.exit(0)  # runs the handlers that its parent has registered
    os.waitpid(child, 0)
    print(worker.exit_code(0), worker.kill(60), flush=True)
    """
    with trainer(code) as process:
        out, _ = process.communicate(timeout=LONG)
    assert out.split() == ["True", "True", "3", "None", "-9"]
    assert worker.kill(LONG) == -signal.SIGKILL


def test_bare_checkout_and_a_working_directory_full_of_traps(tmp_path):
    """The package comes from where the trainer has it, and nothing else from the folder."""
    checkout, folder = tmp_path / "checkout", tmp_path / "folder"
    checkout.mkdir()
    folder.mkdir()
    (checkout / "vla_gym").symlink_to(ROOT / "vla_gym")
    for name in ("numpy", "pickle", "vla_gym"):
        (folder / f"{name}.py").write_text("raise AssertionError('wrong module')\n")
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, sys
        sys.path.insert(0, {str(checkout)!r})
        sys.path.append({str(ROOT / "tests" / "helpers")!r})
        from vla_gym.vector.processes.client import ProcessServer
        server = ProcessServer.acquire()
        worker = server.spawn("worker_targets:report", b"x", [1], {{}}, timeout=60)
        sys.exit(worker.exit_code(60))
        """)
    )
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    out = subprocess.run(
        [sys.executable, script], cwd=folder, env=environ, capture_output=True, timeout=LONG
    )
    assert out.returncode == 0, out.stderr.decode()
    told = json.loads(out.stdout)
    assert told["package"] == str(checkout / "vla_gym" / "__init__.py")
    assert told["path"][0] == str(checkout)
    assert (told["folder"], told["argv"]) == (str(folder), [str(script)])
    assert "PYTHONPATH" not in told["environ"]


# --- preload --------------------------------------------------------------------------------------


def test_workers_share_what_the_server_has_loaded(loaded):
    threads = psutil.Process(loaded.pid).num_threads()
    assert threads == 1, "a fork of a process with threads is not safe"
    several = [tell(loaded, "simulation", b"%d" % task, ASSETS="lite") for task in (7, 8, 8)]
    assert several[1]["qpos"] == several[2]["qpos"]
    for told in several:
        forbidden = {"torch", "libero", "robosuite", "OpenGL", "glfw", "transformers", "gym"}
        assert not forbidden & set(told["modules"])
        assert {"mujoco", "numba"} <= set(told["modules"])
        names = [Path(library).name for library in told["libraries"]]
        assert not [n for n in names if n.startswith(("libEGL", "libGL", "libcuda", "libOSMesa"))]
        # Own: the state of one simulation, and the pages that Python's reference counts touch.
        own = told["memory"]["Private_Dirty"] + told["memory"]["Private_Clean"]
        assert own < 0.3 * told["memory"]["Rss"]
        assert told["gl"] == os.environ["MUJOCO_GL"]
        assert told["can_draw"]


def test_workers_that_never_draw_need_no_drawing_code(fresh):
    preload(fresh, PRELOADED_TASKS, "lite", timeout=LONG, images=False)
    assert not tell(fresh, "simulation", b"8", ASSETS="lite")["can_draw"]


@without_gpu
def test_workers_draw_with_the_servers_renderers(fresh, monkeypatch):
    monkeypatch.setenv("LP_NUM_THREADS", "0")
    preload(fresh, PRELOADED_TASKS, "lite", timeout=4 * LONG, drawing=DRAWING)
    assert psutil.Process(fresh.pid).num_threads() == 1
    cache = SceneCache(**DRAWING)
    model = load_task(get_task("goal", 8), "lite")
    for state_id in (0, 3):
        told = tell(fresh, "draw", b"%d" % state_id)
        assert len(told["sizes"]) == told["left"] == 1
        expected = picture(cache, model, state_id)
        assert told["images"] == [expected, expected]
    cache.close()


@without_gpu
@pytest.mark.parametrize(
    ("variable", "value", "max_scenes"),
    [
        ("LP_NUM_THREADS", "2", 1),  # Mesa's drawing threads are not forked along
        ("MESA_SHADER_CACHE_DISABLE", "false", 1),  # nor is that of its cache, for who wants it
        ("LP_NUM_THREADS", "0", 0),  # more scenes than fit
    ],
)
def test_what_cannot_be_shared_is_not(fresh, monkeypatch, variable, value, max_scenes):
    monkeypatch.setenv(variable, value)
    drawing = {**DRAWING, "max_scenes": max_scenes}
    preload(fresh, PRELOADED_TASKS, "lite", timeout=4 * LONG, drawing=drawing)
    began = cpu_seconds(fresh.pid)
    preload(fresh, PRELOADED_TASKS, "lite", timeout=5, drawing=drawing)
    assert cpu_seconds(fresh.pid) - began < 0.3  # nor is it tried again
    assert psutil.Process(fresh.pid).num_threads() == 1
    assert tell(fresh, "draw")["sizes"] == []


@without_gpu
def test_a_worker_may_compile_new_shaders(fresh, monkeypatch, tmp_path):
    """With Mesa's cache on disk its third new shader would wait for ever for a lost thread."""
    monkeypatch.setenv("MESA_SHADER_CACHE_DIR", str(tmp_path))
    preload(fresh, PRELOADED_TASKS, "lite", timeout=4 * LONG, drawing=DRAWING)
    assert tell(fresh, "compile_shaders")["found"] == 1


@without_gpu
def test_the_server_keeps_the_latest_renderers_alone(fresh, monkeypatch):
    """Two plans whose environments keep one scene each: neither evicts the other's renderer."""
    monkeypatch.setenv("LP_NUM_THREADS", "0")
    for size, found in ((32, [32]), (40, [32, 40]), (32, [32, 40]), (48, [32, 48])):
        drawing = {**DRAWING, "image_size": size}
        preload(fresh, PRELOADED_TASKS, "lite", timeout=4 * LONG, drawing=drawing)
        assert tell(fresh, "draw")["sizes"] == found


def test_mujocos_warnings_reach_the_log_of_a_worker(loaded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = tell(loaded, "warn_in_mujoco")
    assert any("Nan" in record for record in told["records"])
    assert told["files"] == []


def test_a_users_own_renderer_works_in_a_worker(loaded):
    told = tell(loaded, "render_with_mujoco", MUJOCO_GL="egl")
    assert not told["before"] and told["brightest"] > 50


def test_loading_again_is_quick_and_errors_are_those_of_the_library(loaded, tmp_path):
    preload(loaded, PRELOADED_TASKS, "lite", timeout=LONG)
    began = cpu_seconds(loaded.pid)
    preload(loaded, PRELOADED_TASKS, "lite", timeout=LONG)
    assert cpu_seconds(loaded.pid) - began < 0.3
    with pytest.raises(UnknownTaskError, match="task_id 99"):
        preload(loaded, [("goal", 99)], "lite", timeout=LONG)
    with pytest.raises(AssetError, match="does not exist"):
        preload(loaded, PRELOADED_TASKS, str(tmp_path / "none"), timeout=LONG)
    with pytest.raises(WorkerError, match="(?s)process server failed.*Traceback.*ValueError"):
        preload(loaded, ["not a pair"], "lite", timeout=LONG)
    assert tell(loaded, "report")["parent"] == loaded.pid


def test_errors_that_do_not_survive_pickling_travel_as_text():
    class Local(VlaGymError):
        pass

    text = WorkerError("as text")
    for error, wanted in ((Local("lost"), text), (AssetError("kept"), AssetError("kept"))):
        assert repr(pickle.loads(pickle_error(error, text))) == repr(wanted)


@pytest.fixture
def endless_preload(tmp_path, monkeypatch) -> Iterator[Callable[[], list[int]]]:
    """A cache whose scene another process is compiling, as it seems; preload() waits for it."""
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path))
    pack = resolve_asset_pack("lite")
    scene, tasks = scene_of(get_task("goal", 8))
    key = scene_request(scene, pack, tasks).key()
    lock = tmp_path / "scenes" / f"{key}.lock"
    lock.parent.mkdir()
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)

        def holders() -> list[int]:
            """Processes that wait for the lock."""
            found = []
            for process in psutil.process_iter(["open_files"]):
                paths = [file.path for file in process.info["open_files"] or ()]
                if str(lock) in paths and process.pid != os.getpid():
                    found.append(process.pid)
            return found

        yield holders


def test_a_server_that_is_busy(server, endless_preload):
    worker = spawn(server, "say_and_sleep")
    errors: list[Exception] = []

    def load() -> None:
        try:
            preload(server, [("goal", 8)], "lite", timeout=3.0)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    until(lambda: endless_preload() == [server.pid], "the server waits")
    with pytest.raises(WorkerError, match="busy with another request"):
        server.spawn("time:sleep", b"", [], {}, timeout=0.05)
    assert worker.kill(0.05) is None
    until(lambda: not runs(worker.pid), "a busy server does not delay a kill")
    thread.join(LONG)
    assert [type(error) for error in errors] == [ServerDied]
    assert "did not answer 'preload' within 3 s and was killed" in str(errors[0])
    assert not psutil.pid_exists(server.pid)


@pytest.mark.parametrize("end", ["forked", "released"])
def test_the_end_of_the_trainer_while_the_server_is_busy(endless_preload, end):
    """It is killed, and a fork of it lives on; or it gives the server back."""
    code = (
        WITH_WORKERS
        + """
    class Interrupt(Exception): pass
    def interrupt(*_): raise Interrupt
    signal.signal(signal.SIGUSR1, interrupt)
    try:
        tasks = [("goal", 8)]
        server.load("vla_gym.vector.preload:preload", tasks=tasks, assets="lite", timeout=1000)
    except Interrupt:
        began = time.monotonic()
        server.release()
        print(time.monotonic() - began, flush=True)
        time.sleep(1000)
    """
    )
    with trainer(code, "forked" if end == "forked" else "alone") as process:
        _, child, *pids = map(int, read_line(process).split())
        try:
            until(lambda: endless_preload() == pids[:1], "the server waits")
            if end == "released":
                process.send_signal(signal.SIGUSR1)
                assert float(read_line(process)) < EXIT_S
                assert not any(map(runs, pids))
            else:
                process.kill()
                until(lambda: not any(map(runs, pids)), "server and workers are gone")
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
