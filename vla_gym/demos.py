"""Record demonstrations of the scripted experts: ``vla-gym demos``.

One ``<suite>_<task id>.npz`` a task: ``images`` uint8 (N, 2, 64, 64, 3) (agentview, wrist),
``proprio`` float32 (N, 8), ``actions`` float32 (N, 7) (the expert's clean action at each frame),
``episode_lengths`` int64 (E,), ``instruction`` and ``meta`` (JSON: how it was made).
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vla_gym.errors import ConfigError, DemoError
from vla_gym.experts import EXPERT_TASKS
from vla_gym.experts.recording import Episode, episode_rng, record_episode
from vla_gym.sim import LiberoSim, SceneRenderer
from vla_gym.suites import get_task
from vla_gym.task_model import load_task_model
from vla_gym.vla.preprocess import IMAGE_SIZE, area_downsample

logger = logging.getLogger(__name__)

FORMAT = 1
RENDER_SIZE = 128
# An expert that fails so often that this many attempts a demonstration are used up is broken.
MAX_ATTEMPTS_PER_DEMO = 4
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "LP_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class DemosConfig:
    """What ``vla-gym demos`` records."""

    output: str = "demos"
    """Folder of the .npz files; tasks that it already holds are skipped."""
    suite: str = "goal"
    """Task suite."""
    task_ids: tuple[int, ...] | None = None
    """Tasks to record; None: all that have an expert."""
    num_demos: int = 40
    """Successful episodes a task."""
    seed: int = 0
    """Layouts and noise are a function of (seed, task, attempt), whatever the worker count."""
    noise: float = 0.15
    """Noise on the executed actions (a normal episode's standard deviation, action units); the
    recorded action is always the expert's undisturbed one."""
    num_workers: int | None = None
    """Processes; None: one per core; 0: no subprocess."""
    assets: str = "lite"
    """Asset pack, ``lite``, ``libero`` or a path."""
    overwrite: bool = False
    """Record again what exists."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is out of range or a task has no expert.
        """
        known = EXPERT_TASKS.get(self.suite.removeprefix("libero_"), ())
        unknown = [
            i for i in self.task_ids or known if get_task(self.suite, i).task_id not in known
        ]
        if unknown:
            raise ConfigError(f"Tasks {unknown} have no expert: expected ids from {known}.")
        if self.num_demos < 1 or self.seed < 0 or not 0.0 <= self.noise <= 1.0:
            raise ConfigError(
                "Expected num_demos >= 1, seed >= 0 and 0 <= noise <= 1, got "
                f"{self.num_demos}, {self.seed} and {self.noise}."
            )
        if self.num_workers is not None and self.num_workers < 0:
            raise ConfigError(f"num_workers must be at least 0, got {self.num_workers}.")


def record_demos(config: DemosConfig, *, progress: bool = True) -> list[Path]:
    """Record demonstrations, one file a task; finished tasks are skipped.

    With ``num_workers > 0`` subprocesses are spawned: a script that calls this needs the usual
    ``if __name__ == "__main__"`` guard.

    Args:
        config: What to record.
        progress: Show a progress bar.

    Returns:
        The files of all tasks, in the order of the task ids asked for.

    Raises:
        ConfigError: A file exists that was made with other settings.
        DemoError: An expert fails far too often.
    """
    suite = get_task(config.suite, 0).suite
    task_ids = config.task_ids if config.task_ids is not None else EXPERT_TASKS[suite]
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    paths = [output / f"{suite}_{i}.npz" for i in task_ids]
    todo = [
        (i, path)
        for i, path in zip(task_ids, paths, strict=True)
        if config.overwrite or not _is_finished(path, _settings(config, i))
    ]
    if not todo:
        return paths
    total = len(todo) * config.num_demos
    with _workers(config) as pool, tqdm(total=total, unit="demo", disable=not progress) as bar:
        for task_id, path in todo:
            bar.set_description(f"{suite} {task_id}")
            _record_task(config, task_id, path, pool, bar)
    return paths


def _record_task(
    config: DemosConfig,
    task_id: int,
    path: Path,
    pool: ProcessPoolExecutor | None,
    bar: tqdm[Any],
) -> None:
    """Record one task: the first ``num_demos`` successes in the order of the attempts."""
    episodes: list[Episode] = []
    attempts = 0
    for episode in _attempts(config, task_id, pool):
        attempts += 1
        if episode is not None:
            episodes.append(episode)
            bar.update()
            bar.set_postfix(attempts=attempts, steps=len(episode))
        if len(episodes) == config.num_demos:
            break
    if len(episodes) < config.num_demos:
        raise DemoError(
            f"The expert of {config.suite} task {task_id} succeeded in {len(episodes)} of "
            f"{attempts} attempts; {config.num_demos} demonstrations were asked for. "
            f"Lower num_demos or noise ({config.noise})."
        )
    logger.info("%s: %d demonstrations in %d attempts", path.name, len(episodes), attempts)
    meta = _settings(config, task_id) | {"attempts": attempts}
    # Written beside the target and renamed, so that a file that exists is always whole.
    scratch = path.with_suffix(f".tmp-{os.getpid()}")
    try:
        with scratch.open("wb") as file:
            np.savez_compressed(
                file,
                images=np.concatenate([e.images for e in episodes]),
                proprio=np.concatenate([e.proprio for e in episodes]),
                actions=np.concatenate([e.actions for e in episodes]),
                episode_lengths=np.array([len(e) for e in episodes], dtype=np.int64),
                instruction=np.array(get_task(config.suite, task_id).instruction),
                meta=np.array(json.dumps(meta)),
            )
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _attempts(
    config: DemosConfig, task_id: int, pool: ProcessPoolExecutor | None
) -> Iterator[Episode | None]:
    """Yield the outcome of attempt 0, 1, ... in this order, whoever finished first."""
    limit = config.num_demos * MAX_ATTEMPTS_PER_DEMO
    if pool is None:
        for attempt in range(limit):
            yield _attempt(config, task_id, attempt)
        return
    # Two attempts a worker are under way: more would be thrown away when the task is complete.
    pending: deque[Future[Episode | None]] = deque()
    window = 2 * _num_workers(config)
    try:
        for attempt in range(limit + window):
            if attempt < limit:
                pending.append(pool.submit(_attempt, config, task_id, attempt))
            if pending and (len(pending) >= window or attempt >= limit):
                yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _attempt(config: DemosConfig, task_id: int, attempt: int) -> Episode | None:
    """Play one attempt in this process."""
    sim, renderer = _studio(config.suite, task_id, config.assets)
    frame = np.empty((2, RENDER_SIZE, RENDER_SIZE, 3), np.uint8)

    def render() -> np.ndarray:
        renderer.render(sim, frame)
        return area_downsample(frame)

    rng = episode_rng(config.seed, sim.task_model, attempt)
    return record_episode(sim, render, rng, noise=config.noise)


@lru_cache(maxsize=1)
def _studio(suite: str, task_id: int, assets: str) -> tuple[LiberoSim, SceneRenderer]:
    """Return this process's simulation and renderer; they are kept while the task is the same."""
    task_model = load_task_model(get_task(suite, task_id), assets)
    renderer = SceneRenderer(task_model, RENDER_SIZE, RENDER_SIZE, profile="fast")
    return LiberoSim(task_model), renderer


@contextmanager
def _workers(config: DemosConfig) -> Iterator[ProcessPoolExecutor | None]:
    """Open the process pool, one thread a process; None when everything runs in this one."""
    count = _num_workers(config)
    if count == 0:
        yield None
        return
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    # Spawn: a fork after EGL or a GPU was initialised is fatal.
    pool = ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _num_workers(config: DemosConfig) -> int:
    return config.num_workers if config.num_workers is not None else os.cpu_count() or 1


def _settings(config: DemosConfig, task_id: int) -> dict[str, Any]:
    """Return what the content of a task's file depends on, as plain JSON data."""
    task_model = load_task_model(get_task(config.suite, task_id), config.assets)
    keep = ("num_demos", "seed", "noise")
    return {
        "format": FORMAT,
        "suite": task_model.task.suite,
        "task_id": task_id,
        **{key: value for key, value in asdict(config).items() if key in keep},
        "pack": task_model.assets.name,
        "pack_digest": task_model.assets.digest,
        "image_size": IMAGE_SIZE,
        "versions": task_model.versions,
    }


def _is_finished(path: Path, settings: dict[str, Any]) -> bool:
    """Tell whether a task's file exists, made with the same settings.

    Raises:
        ConfigError: If it was made with other settings, or is no file of ours.
    """
    if not path.exists():
        return False
    try:
        with np.load(path, allow_pickle=False) as data:
            meta = json.loads(str(data["meta"]))
    except Exception as error:  # zip, key and JSON errors alike
        raise ConfigError(
            f"{path} cannot be read ({error}): delete it or set overwrite."
        ) from error
    different = {
        key: (meta.get(key), value) for key, value in settings.items() if meta.get(key) != value
    }
    if different:
        raise ConfigError(
            f"{path} was recorded with other settings (there, asked for): {different}. "
            "Choose another output folder or set overwrite."
        )
    return True
