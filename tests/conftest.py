"""Shared set-up: one thread each, a cache of the tests' own, the real LIBERO meshes."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
# Programs that tests start would else compile the package anew each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# What is about LIBERO's own pack names it.
os.environ["VLA_GYM_ASSETS"] = "lite"

# A shell that starts the tests in the background has them, and all that they start, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import platformdirs  # noqa: E402
import pytest  # noqa: E402

from vla_gym.assets import resolve_asset_pack  # noqa: E402

pytest_plugins = ("vector_fixtures",)
# Kept between runs, apart from the user's own cache.
TEST_CACHE = Path(
    os.environ.setdefault("VLA_GYM_CACHE", str(platformdirs.user_cache_path("vla-gym-tests")))
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose marker names something that this machine lacks."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device: torch.cuda.is_available() is False")


@pytest.fixture(scope="session", autouse=True)
def _compile_once() -> None:
    """Of several test processes, let each compile another part of what all of them need."""
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if number:
        import first_use

        TEST_CACHE.mkdir(parents=True, exist_ok=True)
        first_use.compile_once(TEST_CACHE, int(number))


@pytest.fixture(scope="module", autouse=True)
def _quick_garbage_collection() -> None:
    """Leave what earlier files loaded (torch, upstream, compiled tasks) out of later collections.

    Many tests collect garbage to see what stays; with everything loaded that takes 0.3 s a time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_error(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command that must do no more than say in one line what is wrong; return the line."""

    def run(main: Callable[[list[str]], int], *arguments: str) -> str:
        capsys.readouterr()
        assert main(list(arguments)) == 2
        out, error = capsys.readouterr()
        assert out == "" and error.startswith("error: ") and error.count("\n") == 1, error
        return error

    return run


@pytest.fixture(scope="session")
def libero_assets_dir() -> Path:
    """The folder of the real LIBERO meshes, from the wheels."""
    return resolve_asset_pack("libero").root


@pytest.fixture(scope="module")
def upstream(libero_assets_dir: Path) -> Iterator[Any]:
    """LIBERO itself, in a process of its own."""
    from upstream import Upstream

    with Upstream(libero_assets_dir) as child:
        yield child
