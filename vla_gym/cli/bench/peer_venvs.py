"""Virtual environments of the peers that ``vla-gym bench --peers`` measures, made when needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from vla_gym.assets.cache import cache_dir
from vla_gym.errors import BenchError
from vla_gym.files import only_process

_TORCH = "torch==2.13.0"  # first: what needs it takes what is there
_PIP_DEADLINE_S = 3600.0
_SIMULATOR = ("robosuite==1.4.0", "mujoco==3.3.7", "cloudpickle==3.1.3")
_RLINF_LIBERO = ("rlinf-libero==0.1.3", "numpy==1.26.4")


@dataclass(frozen=True)
class Peer:
    """A package that is measured.

    Attributes:
        title: What tables call it.
        requirements: What pip installs beside torch.
        alone: What it then installs without dependencies: packages that pin another torch, or
            whose LIBERO environment needs a small part of them.
    """

    title: str
    requirements: tuple[str, ...]
    alone: tuple[str, ...] = ()


PEERS = {
    "rlinf": Peer(
        "RLinf's",
        (*_SIMULATOR, *_RLINF_LIBERO, "omegaconf==2.3.0", "ray==2.60.0"),
        ("rlinf==0.3.0",),
    ),
    "torchrl": Peer("TorchRL's", (*_SIMULATOR, *_RLINF_LIBERO, "torchrl==0.14.1")),
    "lerobot": Peer(
        "LeRobot's",
        (
            *_SIMULATOR,
            "accelerate==1.15.0",
            "av==15.1.0",
            "bddl==1.0.1",
            "datasets==4.8.5",
            "deepdiff==8.6.1",
            "diffusers==0.35.2",
            "draccus==0.10.0",
            "easydict==1.14",
            "einops==0.8.2",
            "future==1.0.0",
            "gymnasium==1.4.0",
            "huggingface_hub==0.35.3",
            "imageio==2.38.1",
            "jsonlines==4.0.0",
            "matplotlib==3.11.2",
            "numpy==2.4.6",
            "pyserial==3.5",
            "termcolor==3.3.0",
            "transformers==4.57.6",
        ),
        ("lerobot==0.4.4", "hf-libero==0.1.4", "torchvision==0.28.0"),
    ),
    "libero2gym": Peer("libero2gym's", (*_SIMULATOR, *_RLINF_LIBERO), ("libero2gym==0.1.0",)),
}


def peer_python(name: str, assets: Path) -> Path:
    """Return the interpreter of a peer's environment, which is made if it is not there.

    Args:
        name: Key of :data:`PEERS`.
        assets: Root of the asset pack, which its LIBERO gets as its own.

    Raises:
        BenchError: If it cannot be made.
    """
    peer, folder = PEERS[name], cache_dir() / "peers" / name
    wanted = f"{sys.version_info[:2]} {_TORCH} {peer.requirements} {peer.alone}"
    stamp, python = folder / "stamp", folder / "bin" / "python"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        busy = f"{name}: another process is making its environment {folder}: wait for it."
        with only_process(folder.with_suffix(".lock"), busy, _PIP_DEADLINE_S, BenchError):
            if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
                shutil.rmtree(folder, ignore_errors=True)
                _run(name, [sys.executable, "-m", "venv", str(folder)])
                pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
                _run(name, [*pip, _TORCH])
                _run(name, [*pip, *peer.requirements])
                if peer.alone:
                    _run(name, [*pip, "--no-deps", *peer.alone])
                stamp.write_text(wanted, encoding="utf-8")
            _link_assets(next(folder.glob("lib/python*/site-packages/libero/libero")), assets)
    except (OSError, StopIteration) as error:
        raise BenchError(f"{name}: its environment {folder} is not usable: {error!r}.") from error
    return python


def _link_assets(libero: Path, assets: Path) -> None:
    """Make a pack the assets of an installed LIBERO; a link, so that all read the same files."""
    link = libero / "assets"
    if link.resolve() != assets.resolve():
        scratch = link.with_name(f"assets.tmp-{os.getpid()}")
        scratch.symlink_to(assets.resolve())
        scratch.replace(link)


def _run(name: str, command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PIP_DEADLINE_S)
    except (subprocess.SubprocessError, OSError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        errors = [line for line in lines if line.lower().startswith("error")] or lines[-1:]
        raise BenchError(
            f"{name}: its environment cannot be made ({' '.join(command[-3:])}): {errors[0]}"
        ) from error
