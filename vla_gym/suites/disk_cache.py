"""The on-disk cache of compiled scenes: keys, verification and the compile process.

A cached scene is a folder ``scenes/<key>`` with scene.mjb, scene.json, whatever other files its
compiler writes, and manifest.json, which holds what the scene was made from (its digest is the key)
and the SHA-256 of the other files. Nothing in it is used before it was verified (a damaged .mjb can
abort the process that loads it); what does not verify is built anew. Folders appear by an atomic
rename, under a lock that other processes respect. Building a scene removes those that nobody has
loaded for long, such as those of old versions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from vla_gym.assets.cache import make_shared
from vla_gym.assets.manifest import damaged_files
from vla_gym.assets.pack import AssetPack
from vla_gym.errors import CompileError
from vla_gym.files import only_process
from vla_gym.outside import Object, file_sha256, read_json

logger = logging.getLogger(__name__)

SCHEMA = 2
COMPILE_TIMEOUT_S = 300.0
UNUSED_DAYS = 30
#: Exit status of a program that says what is wrong in the last line of its output.
EXPLAINED = 3
#: What every compiler writes.
FILES = ("scene.mjb", "scene.json")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SceneRequest:
    """What to compile, and how.

    Attributes:
        scene: Scene name, e.g. ``"goal"``.
        pack: The asset pack.
        program: The module that compiles it, run as ``python -m PROGRAM REQUEST.json``.
        inputs: What the compiled scene depends on besides the asset pack and the machine, as plain
            data: digests of the compiler's sources and of the tasks' files, versions of packages,
            whatever makes a cached scene wrong when it changes.
        arguments: What the program needs to know, as plain data; the cache adds the folder ``out``.
    """

    scene: str
    pack: AssetPack
    program: str
    inputs: dict[str, Any]
    arguments: dict[str, Any]

    def identity(self) -> dict[str, Any]:
        """Return everything that the compiled scene depends on."""
        return {
            "schema": SCHEMA,
            "machine": [platform.system(), platform.machine(), sys.byteorder],
            "pack": self.pack.name,
            "pack_digest": self.pack.digest,
            "scene": self.scene,
            **self.inputs,
        }

    def key(self) -> str:
        """Return the cache key, readable prefix included."""
        return _key(self.identity())


def load_scene(
    request: SceneRequest, cache_dir: Path, timeout_s: float = COMPILE_TIMEOUT_S
) -> Path:
    """Return the verified folder of a scene, compiling it first if necessary.

    Args:
        request: What to compile.
        cache_dir: Folder of all caches; ``scenes/`` is made in it.
        timeout_s: Deadline of the compile process and of the wait for another one, in seconds.

    Raises:
        CompileError: If the compile process fails or misses its deadline, or the cache folder
            cannot be written.
    """
    key = request.key()
    scenes = cache_dir / "scenes"
    folder = scenes / key
    if verify(folder, key):
        return folder
    try:
        make_shared(scenes)
        lock = scenes / f"{key}.lock"
        busy = f"Another process has held {lock} for more than {timeout_s:g} s: "
        busy += "end it, then try again."
        with only_process(lock, busy, timeout_s, CompileError):
            # Another process may have built it while this one waited.
            if not verify(folder, key):
                _build(request, key, folder, timeout_s)
                _remove_unused(scenes)
    except OSError as error:
        raise CompileError(
            f"The scene cache {scenes} cannot be written ({error}): expected a writable folder. "
            "Set VLA_GYM_CACHE to one."
        ) from error
    return folder


class _Manifest(Struct):
    identity: Object
    sha256: dict[str, str]


def verify(folder: Path, key: str) -> bool:
    """Return whether a scene folder is complete, belongs to ``key`` and is undamaged."""
    try:
        if not folder.exists():
            return False
        manifest = read_json(folder / MANIFEST, _Manifest)
        if _key(manifest.identity) != key or not manifest.sha256.keys() >= set(FILES):
            raise ValueError("it belongs to another scene, pack or version.")
        if damaged := damaged_files(folder, manifest.sha256):
            raise ValueError(f"{damaged[0]} is not as it was written.")
    except (OSError, ValueError, KeyError) as error:
        logger.warning("Cached scene %s will be rebuilt: %s", folder, error)
        return False
    with contextlib.suppress(OSError):  # a cache that cannot be written is not cleaned up either
        os.utime(folder / MANIFEST)  # when it was last used
    return True


def _remove_unused(scenes: Path) -> None:
    """Remove what nobody has loaded for long, and what killed builds have left behind.

    A process that has loaded a scene keeps it in memory.
    """
    oldest = time.time() - UNUSED_DAYS * 86400
    for folder in [path for path in scenes.iterdir() if path.is_dir()]:
        with contextlib.suppress(OSError):  # another process is at it, or it is not ours to remove
            manifest = folder / MANIFEST
            if (manifest if manifest.exists() else folder).stat().st_mtime < oldest:
                logger.info("Removing the unused compiled scene %s.", folder)
                shutil.rmtree(folder)


def _key(identity: dict[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:20]
    return f"{identity['scene']}-{identity['pack']}-{digest}"


def _build(request: SceneRequest, key: str, folder: Path, timeout_s: float) -> None:
    # A warning, so that it is seen without any set-up: the wait would look like a hang.
    logger.warning("Compiling scene %s for its first use on this machine, some seconds.", key)
    for leftover in folder.parent.glob(f".{key}-*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{key}-") as scratch:
        fresh = Path(scratch) / "scene"
        fresh.mkdir()
        _run_compiler(request, Path(scratch), fresh, timeout_s)
        missing = [name for name in FILES if not (fresh / name).is_file()]
        if missing:
            raise CompileError(f"The compile process did not write {', '.join(missing)}.")
        manifest = {
            "identity": request.identity(),
            "sha256": {p.name: file_sha256(p) for p in sorted(fresh.iterdir()) if p.is_file()},
        }
        (fresh / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        if folder.exists() or folder.is_symlink():
            # What is there did not verify. It goes away with the scratch folder.
            folder.rename(Path(scratch) / "damaged")
        fresh.rename(folder)


def _run_compiler(request: SceneRequest, scratch: Path, out: Path, timeout_s: float) -> None:
    """Run the request's program in its own process group, with its output captured."""
    request_file = scratch / "request.json"
    content = request.arguments | {"out": str(out.resolve())}
    request_file.write_text(json.dumps(content), encoding="utf-8")
    log = scratch / "output.txt"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", request.program, str(request_file)],
            stdin=subprocess.PIPE,  # never written: its end tells the child that we are gone
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env=_compiler_environment(),
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
    if status != 0:
        reason = f"took more than {timeout_s:g} s" if status is None else f"ended with {status}"
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if status == EXPLAINED and lines:
            raise CompileError(f"Compiling scene {request.scene!r} failed: {lines[-1]}")
        output = "\n".join(line[:400] for line in lines[-40:])
        raise CompileError(
            f"Compiling scene {request.scene!r} from the {request.pack.name!r} assets in "
            f"{request.pack.root} failed: the compile process {reason}. Its output ends with:\n"
            + output
            + _advice(output)
        )


def _compiler_environment() -> dict[str, str]:
    """Return the child's environment: our package importable, one thread, no GL context."""
    dropped = ("PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    environment |= dict.fromkeys(threads, "1")
    # robosuite loads a GL backend even where nothing is rendered; this one needs no library.
    environment["MUJOCO_GL"] = "glx"
    # The parent may run from a checkout that is not installed, in another working directory, and
    # a suite's compiler may be wherever the parent found the suite.
    ours = str(Path(__file__).absolute().parents[2])
    path = [ours, *map(os.path.abspath, filter(None, sys.path))]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path))
    return environment


def _advice(output: str) -> str:
    """Return what to do about a known cause of failure, or nothing."""
    if any(library in output for library in ("libGL.so", "libgthread", "libglib")):
        return "\nOpenCV's system libraries are missing: apt-get install libgl1 libglib2.0-0"
    if "No space left" in output:
        return "\nFree some space there or point VLA_GYM_CACHE to another disk."
    return ""
