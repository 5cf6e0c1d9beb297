"""Checks that try things out: off-screen OpenGL, imports, CUDA, physics, speed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_gym.cli.doctor.asking import Ask, Finding

APT_LINE = "apt-get install -y libegl1 libgl1-mesa-dri libgl1 libglib2.0-0"
# How far in cm the bowl of libero_spatial task 5 slides while official state 0 settles; all states
# alike to 1e-6. Upstream's own environment with the real meshes: 1.460 with mujoco 3.3.7, 3.69
# with 3.8.1. On the lite pack, whose ramekin is level: 0.0005.
SETTLED_CM = {"libero": 1.46, "lite": 0.0}
SETTLED_TOLERANCE_CM = 0.5
SLOW_IMAGES_MS = 50.0
_SOFTWARE = ("llvmpipe", "softpipe", "swrast", "swiftshader")


def check_gl(ask: Ask) -> Finding:
    """Off-screen OpenGL: the GL_RENDERER string, or why there is none."""
    answer = ask("gl")
    if answer.data is None:
        mend = f"The OpenGL driver crashed or hangs; install Mesa's: {_apt()}"
        return Finding("fail", f"no off-screen OpenGL ({answer.trouble})", mend)
    renderer, devices, error = (answer.data[key] for key in ("renderer", "devices", "error"))
    if renderer is not None:
        return _judge_renderer(renderer)
    if not answer.data["library"]:
        return Finding("fail", f"libEGL is missing ({error})", _apt())
    if wanted := os.environ.get("MUJOCO_EGL_DEVICE_ID"):
        value = f"MUJOCO_EGL_DEVICE_ID={wanted} does not work ({error})"
        return Finding("fail", value, f"Unset it, or choose from: {_listing(devices)}.")
    if not devices:
        value = "libEGL is there, but no driver offers a device"
        return Finding("fail", value, _gpu_mend() if has_gpu() else _apt())
    value = f"no EGL device can render ({error}); devices: {_listing(devices)}"
    nodes = sorted(Path("/dev/dri").glob("renderD*"))
    if locked := [str(path) for path in nodes if not os.access(path, os.R_OK | os.W_OK)]:
        mend = (
            f"No access to {', '.join(locked)}: sudo usermod -aG render,video $USER, log in again"
        )
        return Finding("fail", value, mend)
    return Finding("fail", value, _apt())


def _judge_renderer(renderer: str) -> Finding:
    if not any(name in renderer.lower() for name in _SOFTWARE):
        return Finding("ok", renderer)
    value = f"{renderer}: drawn in software, on the CPU"
    threads = os.environ.get("LP_NUM_THREADS", "0")
    if "llvmpipe" in renderer.lower() and threads != "0":
        mend = (
            "Unset it, or set it to 0 as this package does: the threads of Mesa's renderer damage "
            "the memory of their process once in a million images or so."
        )
        return Finding("warn", f"{value}, with LP_NUM_THREADS={threads}", mend)
    mend = (
        "There is no GPU here, and none is needed. What keeps images cheap: assets='lite', "
        "visual_profile='fast', small images, chunk_len (one image a chunk)."
    )
    return Finding("warn", value, _gpu_mend() if has_gpu() else mend)


def check_imports(ask: Ask) -> Finding:
    """Do torch and transformers import, and does torchvision fit them?"""
    answer = ask("imports")
    if answer.data is None:
        value = f"importing torch and transformers failed: {answer.trouble}"
        return Finding("fail", value, "pip install --force-reinstall torch transformers")
    names = ("torch", "torchvision", "transformers")
    torch, vision, transformers = (answer.data[name] for name in names)
    versions = {name: answer.data[name]["version"] for name in names}
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not torch["version"]:
        value = torch["error"] or "torch is not installed"
        return Finding("fail", value, "pip install --force-reinstall torch")
    if vision["error"]:
        mend = (
            f"torchvision does not fit torch {torch['version']} and breaks models of transformers. "
            "vla_gym does not need it: pip uninstall -y torchvision (or install the one made for "
            "this torch, from the same package index)"
        )
        value = f"{shown}; torchvision: {vision['error']}"
        return Finding("fail" if transformers["error"] else "warn", value, mend)
    if not transformers["version"]:
        value = f"{shown}; transformers: {transformers['error'] or 'not installed'}"
        return Finding("fail", value, "pip install -U transformers")
    return Finding("ok", shown)


def check_cuda(ask: Ask) -> Finding:
    """Which EGL device draws on which CUDA device."""
    cuda = (ask("imports").data or {}).get("cuda", [])
    if not cuda:
        return Finding("ok", "none (not needed by the embedded VLA)")
    devices = (ask("gl").data or {}).get("devices", [])
    names = ", ".join(f"cuda:{i} {name}" for i, name in enumerate(cuda))
    pairs = {row["cuda"]: i for i, row in enumerate(devices) if row["cuda"] is not None}
    if not pairs:
        return Finding("warn", f"{names}; no EGL device draws on it", _gpu_mend())
    shown = ", ".join(f"EGL {egl} = GPU {gpu}" for gpu, egl in sorted(pairs.items()))
    value = f"{names}; {shown}"
    first = next((i for i, row in enumerate(devices) if row["works"]), None)
    wanted = os.environ.get("MUJOCO_EGL_DEVICE_ID")
    drawing = int(wanted) if wanted and wanted.isdigit() else first
    if drawing is not None and drawing < len(devices) and devices[drawing]["cuda"] is None:
        best = pairs[min(pairs)]
        mend = f"MuJoCo draws on EGL device {drawing}, no GPU: export MUJOCO_EGL_DEVICE_ID={best}"
        return Finding("warn", value, mend)
    if len(pairs) > 1 and not wanted:
        value += "; choose the one that draws with MUJOCO_EGL_DEVICE_ID (EGL's number)"
    return Finding("ok", value)


def check_settle(ask: Ask) -> Finding:
    """Does the bowl of libero_spatial task 5 settle where LIBERO's data has it?"""
    answer = ask("settle", _pack_to_settle())
    if answer.data is None:
        return Finding("fail", answer.trouble, _simulation_mend(answer.trouble))
    pack, found = answer.data["pack"], answer.data["cm"]
    value = (
        f"bowl of libero_spatial task 5 slides {found:.2f} cm, expected {SETTLED_CM[pack]:.2f} "
        f"({pack} pack, mujoco {answer.data['mujoco']})"
    )
    if abs(found - SETTLED_CM[pack]) <= SETTLED_TOLERANCE_CM:
        return Finding("ok", value)
    mend = (
        "Physics differ from LIBERO's data, so success rates are not comparable: "
        "pip install 'mujoco>=3.3,<3.4', then run this again"
    )
    return Finding("fail", value, mend)


def _pack_to_settle() -> str:
    """Settling is judged on the real meshes where they are."""
    from vla_gym.assets import resolve_asset_pack
    from vla_gym.errors import VlaGymError

    try:
        resolve_asset_pack("libero")
    except VlaGymError:
        return "lite"
    return "libero"


def check_speed(ask: Ask) -> Finding:
    """How fast is one environment?"""
    answer = ask("speed", "lite")
    if answer.data is None:
        return Finding("fail", answer.trouble, _simulation_mend(answer.trouble))
    rates = answer.data
    images_ms = 1000 / rates["images"] - 1000 / rates["states"]
    value = (
        f"{rates['images']:.0f} control steps/s with two 128x128 images each, "
        f"{rates['states']:.0f} without; images take {images_ms:.1f} ms "
        f"(one environment, {rates['pack']} pack)"
    )
    if images_ms <= SLOW_IMAGES_MS:
        return Finding("ok", value)
    mend = (
        "Images are slow: look at 'gl', use visual_profile='fast', smaller images, chunk_len (one "
        "image a chunk) or assets='lite'"
    )
    return Finding("warn", value, mend)


def _simulation_mend(trouble: str) -> str:
    if "no answer" in trouble:
        return "Try again on an idle machine: the first run compiles the simulation."
    return "Mend what is marked above first, then run this again."


def has_gpu() -> bool:
    """Tell whether the kernel shows an NVIDIA device, whatever the libraries make of it."""
    return Path("/dev/nvidia0").exists() or Path("/dev/nvidiactl").exists()


def in_container() -> bool:
    """Tell whether this process runs in a container."""
    return any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv"))


def _listing(devices: Sequence[Mapping[str, Any]]) -> str:
    rows = [row["vendor"] or row["file"] or "does not start" for row in devices]
    return ", ".join(f"{i} ({name})" for i, name in enumerate(rows)) or "none"


def _gpu_mend() -> str:
    if in_container():
        return (
            "In a container the NVIDIA runtime hands the graphics libraries over only when asked: "
            "start it with `--gpus all -e NVIDIA_DRIVER_CAPABILITIES=all`."
        )
    return (
        "There is a GPU, but its EGL library is not found: install the driver's graphics part "
        "(Debian, Ubuntu: libnvidia-gl-<driver version>) and check that "
        "/usr/share/glvnd/egl_vendor.d/10_nvidia.json exists."
    )


def _apt() -> str:
    if shutil.which("apt-get"):
        return f"{'' if os.geteuid() == 0 else 'sudo '}{APT_LINE}"
    return f"Install EGL and a driver for it (Debian: {APT_LINE})."
