"""What the workers of test_process_server.py run; each is called with payload and fds."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

from vector_processes import descriptors


def _tell(fd: int, value: object) -> None:
    with open(fd, "w", closefd=False) as file:
        json.dump(value, file)


def report(payload: bytes, fds: list[int]) -> None:
    """Tell what a worker sees."""
    import numpy as np

    import vla_gym

    _tell(
        fds[0],
        {
            "payload": len(payload) if len(payload) > 100 else payload.decode(),
            "fds": fds,
            "open": descriptors(),
            "inheritable": [os.get_inheritable(fd) for fd in fds],
            "environ": dict(os.environ),
            "folder": os.getcwd(),
            "path": sys.path,
            "argv": sys.argv,
            "parent": os.getppid(),
            "group": os.getpgid(0),
            "session": os.getsid(0),
            "threads": len(os.listdir("/proc/self/task")),
            "sigint": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
            "sigalrm": signal.getsignal(signal.SIGALRM) == signal.SIG_DFL,
            "timer": signal.getitimer(signal.ITIMER_REAL)[0],
            "blocked": [int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
            "random": [random.random(), np.random.random()],
            "package": vla_gym.__file__,
        },
    )


def say_and_sleep(payload: bytes, fds: list[int]) -> None:
    """Say that it runs, then do nothing."""
    if fds:
        os.write(fds[0], b"x")
    time.sleep(1000)


def spin(payload: bytes, fds: list[int]) -> None:
    os.write(fds[0], b"x")
    while True:
        pass


def sleep_with_child(payload: bytes, fds: list[int]) -> None:
    """Tell the id of a child process that outlives its parent."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    _tell(fds[0], child.pid)
    os.close(fds[0])
    if payload == b"stay":
        time.sleep(1000)


def leave(payload: bytes, fds: list[int]) -> None:
    """End in one of the ways a program can end."""
    if payload == b"quiet":
        sys.exit(3)
    sys.stdout.write("half a line")
    if payload == b"abort":
        sys.stdout.flush()
        os.abort()
    if payload == b"raise":
        raise ValueError("thrown in a worker")
    if payload == b"interrupt":
        raise KeyboardInterrupt
    if payload == b"exit":
        sys.exit(3)
    if payload == b"message":
        sys.exit("a last word")


def simulation(payload: bytes, fds: list[int]) -> None:
    """Play a little in the model that the server has loaded, and tell what that takes."""
    import numpy as np

    from vla_gym.envs import scene_cache
    from vla_gym.sim import LiberoSim, model_io
    from vla_gym.suites import get_task
    from vla_gym.suites.libero import suite as libero

    def no_reading(*arguments: object) -> None:
        raise AssertionError(f"{arguments} is read again")

    modules = sorted({name.partition(".")[0] for name in sys.modules})
    libraries = sorted({line.split()[-1] for line in open("/proc/self/maps") if ".so" in line})
    model_io._read = libero.load_task_model = no_reading
    model = scene_cache.load_task(get_task("goal", int(payload)), os.environ["ASSETS"])
    sim = LiberoSim(model)
    sim.reset(model.official_layout(0))
    sim.run_chunk(np.zeros((8, 7)))
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        fields = (line.split() for line in list(file)[1:])
        memory = {name.rstrip(":"): int(kb) / 1024 for name, kb, _ in fields}
    _tell(
        fds[0],
        {
            "modules": modules,
            "libraries": libraries,
            "memory": memory,
            "qpos": sim.qpos.tolist(),
            "gl": os.environ.get("MUJOCO_GL"),
            "can_draw": _can_draw(model),
        },
    )


def _can_draw(model: Any) -> bool:
    """Whether compiled drawing code and the model's cut meshes are there already."""
    from vla_gym.sim.model_io import load_shared
    from vla_gym.sim.rendering.software.draw_scene import draw_scene

    return bool(draw_scene.signatures) and "mesh_chunks" in load_shared(model).derived


def warn_in_mujoco(payload: bytes, fds: list[int]) -> None:
    """Make MuJoCo warn, and tell what reaches the log and the folder."""
    import logging

    import mujoco

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("vla_gym.mujoco").addHandler(handler)
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><body><freejoint/><geom size='1'/></body></worldbody></mujoco>"
    )
    data = mujoco.MjData(model)
    data.qpos[0] = float("nan")
    mujoco.mj_step(model, data)
    _tell(fds[0], {"records": records, "files": os.listdir()})


def render_with_mujoco(payload: bytes, fds: list[int]) -> None:
    """Use MuJoCo's own renderer, as a user's wrapper may."""
    import mujoco

    loaded = "mujoco.egl" in sys.modules
    model = mujoco.MjModel.from_xml_string(
        "<mujoco><worldbody><light pos='0 0 3'/><geom size='1'/></worldbody></mujoco>"
    )
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, 32, 32) as renderer:
        renderer.update_scene(data)
        _tell(fds[0], {"before": loaded, "brightest": int(renderer.render().max())})


def draw(payload: bytes, fds: list[int]) -> None:
    """Tell which renderers are open; draw an official state with them, then with a new one."""
    from vla_gym.envs.scene_cache import SceneCache, _pool, load_task
    from vla_gym.suites import get_task

    sizes = [size for *_, size, _ in _pool().renderers]
    if not payload:
        return _tell(fds[0], {"sizes": sizes})
    cache = SceneCache(image_size=48, visual_profile="libero", max_scenes=1)
    model = load_task(get_task("goal", 8), "lite")
    images = []
    for _ in range(2):
        images.append(picture(cache, model, int(payload)))
        renderer = cache.renderer(model)
        renderer.close()
    cache.close()
    left = len(_pool().renderers)
    _tell(fds[0], {"left": left, "sizes": sizes, "images": images})


def compile_shaders(payload: bytes, fds: list[int]) -> None:
    """Draw with a shared renderer, then so that Mesa compiles a new shader each time, and pause."""
    import time

    from vla_gym.envs.scene_cache import SceneCache, _pool, load_task
    from vla_gym.suites import get_task

    found = len(_pool().renderers)
    cache = SceneCache(image_size=48, visual_profile="libero", max_scenes=1)
    picture(cache, load_task(get_task("goal", 8), "lite"), 0)
    from OpenGL import GL as gl

    for lights in range(8):
        gl.glEnable(gl.GL_FOG)
        gl.glEnable(gl.GL_LIGHTING)
        gl.glEnable(gl.GL_LIGHT0 + lights)
        gl.glBegin(gl.GL_TRIANGLES)
        for corner in ((0, 0, 0), (1, 0, 0), (0, 1, 0)):
            gl.glVertex3f(*corner)
        gl.glEnd()
        gl.glFinish()
        time.sleep(0.1)  # for a thread to go to sleep
    cache.close()
    _tell(fds[0], {"found": found})


def picture(cache: Any, model: Any, state: int) -> Any:
    """Return the pixels of both cameras in an official state, as lists."""
    import numpy as np

    sim = cache.simulation(model)
    sim.reset(model.official_layout(state))
    out = np.empty((2, 48, 48, 3), np.uint8)
    cache.render(sim, out, ("agentview", "robot0_eye_in_hand"))
    return out.tolist()
