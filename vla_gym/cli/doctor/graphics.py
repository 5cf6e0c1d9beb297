"""Checks of off-screen OpenGL, and of its devices against those of CUDA."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vla_gym.cli.doctor import children
from vla_gym.cli.doctor.report import Check

APT_PACKAGES = "libegl1 libgl1-mesa-dri libgl1 libglib2.0-0"
APT_LINE = f"apt-get install -y {APT_PACKAGES}"
GL_TIMEOUT = 60.0  # seconds; a first llvmpipe start takes about one
_PROGRAM = Path(__file__).with_name("gl_probe.py")
_SOFTWARE = ("llvmpipe", "softpipe", "swrast", "swiftshader")
_SOFTWARE_MEND = (
    "There is no GPU here, and none is needed. What keeps images cheap: assets='lite', "
    "visual_profile='fast', small images, chunk_len (one image a chunk)."
)
_THREADS_MEND = (
    "Unset it, or set it to 0 as this package does: the threads of Mesa's renderer damage the "
    "memory of their process once in a million images or so."
)
_CONTAINER_MEND = (
    "In a container the NVIDIA runtime hands the graphics libraries over only when asked: start "
    "it with `--gpus all -e NVIDIA_DRIVER_CAPABILITIES=all`."
)


def check_gl(timeout: float = GL_TIMEOUT) -> Check:
    """Off-screen OpenGL: the GL_RENDERER string, or why there is none."""
    # By path and without our package: this must answer where nothing else works.
    answer = children.ask(
        ["-P", str(_PROGRAM)], timeout, {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl"}
    )
    if answer.data is None:
        mend = f"The OpenGL driver crashed or hangs; install Mesa's: {_apt()}"
        return Check("gl", "fail", f"no off-screen OpenGL ({answer.trouble})", mend)
    return judge_gl(answer.data)


def judge_gl(found: Mapping[str, Any]) -> Check:
    """Turn the probe's answer into a check; apart from it, so that it can be tested."""
    renderer, devices = found["renderer"], found["devices"]
    if renderer is not None:
        if not any(name in renderer.lower() for name in _SOFTWARE):
            return Check("gl", "ok", renderer)
        value = f"{renderer}: drawn in software, on the CPU"
        threads = os.environ.get("LP_NUM_THREADS", "0")
        if "llvmpipe" in renderer.lower() and threads != "0":
            return Check("gl", "warn", f"{value}, with LP_NUM_THREADS={threads}", _THREADS_MEND)
        return Check("gl", "warn", value, _gpu_mend() if has_gpu() else _SOFTWARE_MEND)
    if not found["library"]:
        value = f"libEGL is missing ({found['error']})"
        return Check("gl", "fail", value, _apt())
    if wanted := os.environ.get("MUJOCO_EGL_DEVICE_ID"):
        value = f"MUJOCO_EGL_DEVICE_ID={wanted} does not work ({found['error']})"
        return Check("gl", "fail", value, f"Unset it, or choose from: {_listing(devices)}.")
    if not devices:
        value = "libEGL is there, but no driver offers a device"
        return Check("gl", "fail", value, _gpu_mend() if has_gpu() else _apt())
    value = f"no EGL device can render ({found['error']}); devices: {_listing(devices)}"
    locked = [str(path) for path in _render_nodes() if not os.access(path, os.R_OK | os.W_OK)]
    if locked:
        mend = (
            f"No access to {', '.join(locked)}: sudo usermod -aG render,video $USER, log in again"
        )
        return Check("gl", "fail", value, mend)
    return Check("gl", "fail", value, _apt())


def with_cost(check: Check, images_ms: float) -> Check:
    """Add what the speed probe measured to a check that found a software renderer."""
    if check.status != "warn":
        return check
    return replace(check, value=f"{check.value}; two 128x128 images take {images_ms:.0f} ms")


def check_cuda_and_egl(imports: Mapping[str, Any] | None, timeout: float = GL_TIMEOUT) -> Check:
    """Which EGL device draws on which CUDA device.

    Args:
        imports: The answer of the imports probe; None if it has none.
        timeout: Deadline in seconds.
    """
    cuda = list((imports or {}).get("cuda", []))
    if not cuda:
        note = "none (not needed by the embedded VLA)"
        return Check(
            "cuda", "ok", note if imports is not None else "unknown: torch does not import"
        )
    answer = children.ask(["-P", str(_PROGRAM)], timeout, {"MUJOCO_GL": "egl"})
    return judge_cuda(cuda, (answer.data or {}).get("devices", []))


def judge_cuda(cuda: list[str], devices: list[Mapping[str, Any]]) -> Check:
    """Compare torch's device names with the EGL devices of the probe's answer."""
    names = ", ".join(f"cuda:{i} {name}" for i, name in enumerate(cuda))
    pairs = {row["cuda"]: i for i, row in enumerate(devices) if row["cuda"] is not None}
    if not pairs:
        return Check("cuda", "warn", f"{names}; no EGL device draws on it", _gpu_mend())
    shown = ", ".join(f"EGL {egl} = GPU {gpu}" for gpu, egl in sorted(pairs.items()))
    value = f"{names}; {shown}"
    first = next((i for i, row in enumerate(devices) if row["works"]), None)
    wanted = os.environ.get("MUJOCO_EGL_DEVICE_ID")
    drawing = int(wanted) if wanted and wanted.isdigit() else first
    if drawing is not None and drawing < len(devices) and devices[drawing]["cuda"] is None:
        best = pairs[min(pairs)]
        mend = f"MuJoCo draws on EGL device {drawing}, no GPU: export MUJOCO_EGL_DEVICE_ID={best}"
        return Check("cuda", "warn", value, mend)
    if len(pairs) > 1 and not wanted:
        value += "; choose the one that draws with MUJOCO_EGL_DEVICE_ID (EGL's number)"
    return Check("cuda", "ok", value)


def has_gpu() -> bool:
    """Tell whether the kernel shows an NVIDIA device, whatever the libraries make of it."""
    return Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()


def in_container() -> bool:
    """Tell whether this process runs in a container."""
    return any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))


def _render_nodes() -> list[Path]:
    return sorted(Path("/dev/dri").glob("renderD*")) if Path("/dev/dri").is_dir() else []


def _listing(devices: list[Mapping[str, Any]]) -> str:
    if not devices:
        return "none"
    return ", ".join(
        f"{i} ({row['vendor'] or row['file'] or 'does not start'})" for i, row in enumerate(devices)
    )


def _gpu_mend() -> str:
    if in_container():
        return _CONTAINER_MEND
    return (
        "There is a GPU, but its EGL library is not found: install the driver's graphics part "
        "(Debian, Ubuntu: libnvidia-gl-<driver version>) and check that "
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json exists."
    )


def _apt() -> str:
    if shutil.which("apt-get"):
        prefix = "" if os.geteuid() == 0 else "sudo "
        return f"{prefix}{APT_LINE}"
    return f"Install EGL and a driver for it (Debian: {APT_LINE})."
