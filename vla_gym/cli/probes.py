"""What the doctor asks of processes of their own, which may crash or hang."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vla_gym.cli import known_episode

ROOT = Path(__file__).absolute().parents[2]
PROBE_TIMEOUT = 300.0  # seconds; compiling the scene, and the first time the simulation, included


class ProbeError(Exception):
    """A probe gave no answer; the message says why."""


class ProbeTimeout(ProbeError):
    """It took too long."""


def ask(probe: str, *arguments: str, timeout: float = PROBE_TIMEOUT) -> Any:
    """Return what one of :data:`PROBES` returns in a process of its own, killed after a deadline.

    Raises:
        ProbeError: If the probe fails or crashes.
        ProbeTimeout: If it is late.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    more = {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-P", "-m", "vla_gym.cli.probes", probe, *arguments]
    environment = {**os.environ, **more, "PYTHONPATH": path}
    try:
        run = subprocess.run(command, env=environment, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise ProbeTimeout(f"no answer within {timeout:.0f} s") from None
    if run.returncode == 0 and run.stdout.strip():
        return json.loads(run.stdout.splitlines()[-1])
    if run.returncode < 0:
        raise ProbeError(f"killed by {signal.Signals(-run.returncode).name}")
    last = run.stderr.decode(errors="replace").strip().splitlines()[-1:]
    raise ProbeError(last[0][:300] if last else f"exit code {run.returncode}")


def probe_gl() -> str:
    """Return the GL_RENDERER and GL_VERSION strings of the context that MuJoCo would use."""
    import mujoco.egl

    context = mujoco.egl.GLContext(16, 16)
    context.make_current()
    from OpenGL import GL

    return f"{GL.glGetString(GL.GL_RENDERER).decode()} | {GL.glGetString(GL.GL_VERSION).decode()}"


def probe_imports() -> dict[str, Any]:
    """Import torch and transformers; return their versions and the CUDA devices' names."""
    import torch

    if importlib.util.find_spec("torchvision"):
        importlib.import_module("torchvision")  # breaks transformers where it does not fit torch
    import transformers
    from transformers import AutoModel, AutoProcessor, PreTrainedModel  # noqa: F401

    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return {"versions": versions, "cuda": cuda}


def probe_settle(pack: str) -> float:
    """Return how far, in cm, the bowl slides sideways while an official state settles."""
    import mujoco
    import numpy as np

    from vla_gym.sim import LiberoSim
    from vla_gym.suites import get_task
    from vla_gym.suites.libero import load_task_model

    model = load_task_model(get_task("spatial", 5), pack)
    layout, sim = model.official_layout(0), LiberoSim(model)
    scene = mujoco.MjModel.from_binary_path(str(model.mjb_path))
    start = layout.qpos[scene.joint("akita_black_bowl_1_joint0").qposadr[0] :][:2]
    sim.reset(layout)
    return 100 * float(np.linalg.norm(sim.body_pos("akita_black_bowl_1_main")[:2] - start))


PROBES: dict[str, Callable[..., Any]] = {
    "gl": probe_gl,
    "imports": probe_imports,
    "settle": probe_settle,
    "known": known_episode.play,
}


if __name__ == "__main__":
    answer = PROBES[sys.argv[1]](*sys.argv[2:])
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # what counts is out; graphics drivers are known to crash while unloaded
