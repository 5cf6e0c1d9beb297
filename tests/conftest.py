"""Shared set-up: one thread each, a cache of the tests' own, the real LIBERO meshes."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Set before NumPy, torch or Mesa start their threads: tests that share few cores otherwise slow
# each other down by an order of magnitude.
for _variable in (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMBA_NUM_THREADS",
):
    os.environ.setdefault(_variable, "1")
# Upstream's renderer as well; see vla_gym.sim.rendering.renderer.without_mesa_threads.
os.environ.setdefault("LP_NUM_THREADS", "0")
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import platformdirs  # noqa: E402
import pytest  # noqa: E402

# Kept between runs, apart from the user's own cache.
TEST_CACHE = Path(
    os.environ.setdefault("VLA_GYM_CACHE", str(platformdirs.user_cache_path("vla-gym-tests")))
)
#: A test copy of LIBERO's meshes may lie beside the checkout; it is never part of it.
ARCHIVE = Path(__file__).resolve().parents[2] / "shared" / "libero-assets.tar.xz"
ENV_VARIABLE = "VLA_GYM_LIBERO_ASSETS"


@functools.cache
def libero_assets() -> Path | None:
    """Return the folder of the real LIBERO meshes, or None when this machine has none.

    Looks at ``VLA_GYM_LIBERO_ASSETS``, then unpacks the archive beside the checkout into the
    tests' cache (once), then looks at the user's cache.
    """
    if os.environ.get(ENV_VARIABLE):
        return Path(os.environ[ENV_VARIABLE])
    unpacked = TEST_CACHE / "libero-assets"
    if not unpacked.is_dir() and ARCHIVE.is_file():
        TEST_CACHE.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="libero-assets-", dir=TEST_CACHE))
        try:
            with tarfile.open(ARCHIVE) as archive:
                archive.extraction_filter = getattr(tarfile, "data_filter", None)
                archive.extractall(scratch)
            scratch.rename(unpacked)
        except OSError:
            if not unpacked.is_dir():  # else another run was faster
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    user_copy = platformdirs.user_cache_path("vla-gym") / "libero-assets"
    for folder in (unpacked, user_copy):
        if folder.is_dir():
            os.environ[ENV_VARIABLE] = str(folder)
            return folder
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose marker names something that this machine lacks."""
    if item.get_closest_marker("libero_assets") and libero_assets() is None:
        pytest.skip(f"the real LIBERO meshes are absent: set {ENV_VARIABLE}")
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")


@pytest.fixture(scope="session", autouse=True)
def _compile_once() -> None:
    """Of several test processes, let each compile another part of what all of them need."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if number:
        import first_use

        TEST_CACHE.mkdir(parents=True, exist_ok=True)
        first_use.compile_once(TEST_CACHE, int(number))


@pytest.fixture(scope="module", autouse=True)
def _quick_garbage_collection() -> Iterator[None]:
    """Leave what earlier files loaded (torch, upstream, compiled tasks) out of later collections.

    Many tests collect garbage to see what stays; with everything loaded that takes 0.3 s a time.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def libero_assets_dir() -> Path:
    """The folder of the real LIBERO meshes."""
    folder = libero_assets()
    if folder is None:
        pytest.skip(f"the real LIBERO meshes are absent: set {ENV_VARIABLE}")
    return folder
