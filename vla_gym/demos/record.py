"""Record demonstrations of the scripted experts or of a VLA: ``vla-gym demos``.

One file a task in LIBERO's HDF5 layout (:mod:`vla_gym.demos.files`, docs/demos.md), made of the
first ``num_demos`` successful attempts. What is finished of a task lies beside it in a hidden
folder, so that a run that was killed goes on where it was.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vla_gym.demos.config import DemosConfig
from vla_gym.demos.files import demo_path, join_parts, part_path, parts_folder, read_meta
from vla_gym.demos.recorder import DemoRecorder
from vla_gym.errors import ConfigError, DemoError
from vla_gym.files import only_process, replacing
from vla_gym.outside import Object, read_json
from vla_gym.rollout import ExpertPolicy, Policy, Start, make_envs, rollout
from vla_gym.rollout.vla_policy import VLAPolicy, vla_identity
from vla_gym.suites import get_suite
from vla_gym.suites.libero import TaskModel, load_task_model
from vla_gym.suites.libero.requests import package_versions

logger = logging.getLogger(__name__)
_identity = functools.cache(vla_identity)  # it reads all of its files

FORMAT = 3
# An expert that fails so often that this many attempts a demonstration are used up is broken; a VLA
# may be as bad as that.
MAX_ATTEMPTS_PER_DEMO, MAX_ATTEMPTS_OF_VLA = 4, 20
# A worker writes an episode while it steps: with large images that takes longer than a step.
STEP_TIMEOUT = 300.0


def record_demos(config: DemosConfig, *, progress: bool = True) -> list[Path]:
    """Record demonstrations, one file a task; finished tasks are skipped.

    Args:
        config: What to record.
        progress: Show a progress bar.

    Returns:
        The files of all tasks, in the order of the suites and task ids asked for.

    Raises:
        ConfigError: A file exists that was made with other settings, or another run is recording
            into the folder.
        DemoError: An expert fails far too often, or a machine does not share the folder.
        WorkerError: A worker process fails again and again. What was recorded is kept.
    """
    config.check()
    tasks = config.tasks()
    output = Path(config.output).expanduser()
    paths = [demo_path(output, task) for task in tasks]
    busy = f"Another run is recording into {output}: wait for it or choose another --output."
    with ExitStack() as stack:
        try:
            output.mkdir(parents=True, exist_ok=True)
            stack.enter_context(only_process(output / ".lock", busy))
        except OSError as error:
            raise ConfigError(
                f"Demonstrations cannot be written to {output} ({error}): choose another --output."
            ) from error
        jobs = []
        for task, path in zip(tasks, paths, strict=True):
            if config.overwrite or not path.exists():
                jobs.append(_Job(config, load_task_model(task, config.assets), path))
            else:
                model = load_task_model(task, config.assets)
                _check_settings(path, read_meta(path), _settings(config, model))
        if jobs:
            _record(config, jobs, progress)
    if config.lerobot is not None:
        from vla_gym.integrations.lerobot.dataset import write_dataset

        write_dataset(paths, Path(config.lerobot).expanduser(), videos=config.lerobot_videos)
    return paths


@dataclass
class _Job:
    """One task that is being recorded.

    Attributes:
        outcomes: Attempts that are known: number -> whether the expert reached the goal.
        running: Attempts under way.
    """

    config: DemosConfig
    model: TaskModel
    path: Path
    outcomes: dict[int, bool] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        """Where finished attempts lie until the task is complete."""
        return parts_folder(Path(self.config.output).expanduser(), self.model.task)

    @property
    def name(self) -> str:
        """What messages call the task."""
        return f"{self.model.task.suite} task {self.model.task.task_id}"

    def open(self) -> None:
        """Make the folder, or take over what an earlier run left in it."""
        settings = _settings(self.config, self.model)
        del settings["num_demos"]  # attempts are the same, however many there will be
        note = self.folder / "settings.json"
        if self.config.overwrite or not note.exists():
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            with replacing(note) as scratch:
                scratch.write_text(json.dumps(settings), encoding="utf-8")
        _check_settings(self.folder, read_json(note, Object), settings)
        for entry in self.folder.iterdir():
            if entry.suffix in (".hdf5", ".failed"):
                self.outcomes[int(entry.stem)] = entry.suffix == ".hdf5"
            elif entry != note:
                entry.unlink()  # half a file of a worker that was killed

    def successes(self) -> list[int]:
        """Return the attempts that reached the goal so far."""
        return sorted(number for number, success in self.outcomes.items() if success)

    def next_attempt(self) -> int | None:
        """Return the attempt to start now; None if those before it may be enough.

        None is started that the result would not contain or count, so the attempts of a task are
        the same in whatever order they finish, and nothing is thrown away.
        """
        number = 0
        hopes = 0
        while number in self.outcomes or number in self.running:
            hopes += self.outcomes.get(number, True)
            number += 1
        of_vla = self.config.vla is not None
        limit = self.config.num_demos * (MAX_ATTEMPTS_OF_VLA if of_vla else MAX_ATTEMPTS_PER_DEMO)
        return number if hopes < self.config.num_demos and number < limit else None

    def end_attempt(self, number: int, success: bool) -> None:
        """Take note of an attempt; the worker has written a success before.

        Raises:
            DemoError: If it is not there: the worker is on a machine with a folder of its own.
        """
        if success and not part_path(self.folder, number).exists():
            raise DemoError(
                f"A success of {self.name} was written, but is not in {self.folder}: with hosts, "
                "--output must be a folder that all machines share, under the same path."
            )
        if not success:
            (self.folder / f"{number:05d}.failed").touch()
        self.outcomes[number] = success
        self.running.remove(number)

    def is_done(self) -> bool:
        """Return whether no attempt is under way, and none to start."""
        return not self.running and self.next_attempt() is None

    def finish(self) -> None:
        """Join the first successes to the task's file.

        Raises:
            DemoError: If there are not enough.
        """
        chosen = self.successes()[: self.config.num_demos]
        if len(chosen) < self.config.num_demos:
            raise DemoError(
                f"In {self.name} {self.config.vla or 'the expert'} succeeded in {len(chosen)} of "
                f"{len(self.outcomes)} attempts; {self.config.num_demos} demonstrations were asked "
                "for. "
                f"Lower num_demos or noise ({self.config.noise})."
            )
        meta = _settings(self.config, self.model) | {"attempts": chosen[-1] + 1}
        join_parts(self.path, [part_path(self.folder, n) for n in chosen], self.model, meta)
        shutil.rmtree(self.folder, ignore_errors=True)
        logger.info("%s: %d demonstrations, %d attempts", self.path, len(chosen), chosen[-1] + 1)


def _record(config: DemosConfig, jobs: list[_Job], progress: bool) -> None:
    """Keep all workers busy until every task is complete, the suites in one environment.

    Raises:
        DemoError: If an expert fails too often.
    """
    suite = get_suite(list(dict.fromkeys(job.model.task.suite for job in jobs)))
    waiting = {suite.tasks.index(job.model.task): job for job in jobs}
    for task_id, job in list(waiting.items()):
        job.open()
        if job.is_done():  # but its run was killed before the parts were joined
            job.finish()
            del waiting[task_id]
    if not waiting:
        return

    def next_start() -> Start | None:
        # Tasks in their order; the next ones keep workers busy while the last attempts of this one
        # are under way.
        for task_id, job in waiting.items():
            if (number := job.next_attempt()) is not None:
                job.running.add(number)
                return Start(suite.name, task_id, seed=number)
        return None

    workers = config.num_workers if config.num_workers is not None else len(os.sched_getaffinity(0))
    total = len(waiting) * config.num_demos
    num_envs = min(config.num_envs or max(1, workers), total)
    policy: Policy = ExpertPolicy()
    if config.vla is not None:
        policy = VLAPolicy(config.vla, device=config.device)
    # A worker may have another working folder.
    shared = replace(config, output=str(Path(config.output).expanduser().resolve()), hosts=None)
    envs = make_envs(
        suite.name,
        waiting,
        policy,
        num_envs=num_envs,
        workers=config.num_workers if config.hosts else workers,
        hosts=config.hosts,
        env_wrappers=[functools.partial(DemoRecorder, config=shared)],
        render_mode="rgb_array",  # the recorder draws: its renderers are opened before the fork
        image_size=policy.image_size if policy.cameras else config.image_size,
        step_timeout=STEP_TIMEOUT,
        **config.env_kwargs(),
    )
    done = sum(len(job.successes()) for job in waiting.values())
    with closing(envs), tqdm(total=total, initial=done, unit="demo", disable=not progress) as bar:
        for episode in rollout(envs, policy, next_start):
            job = waiting[episode.task_id]
            job.end_attempt(episode.start.seed, episode.success)
            bar.update(episode.success)
            bar.set_description(f"{job.name}, {len(job.outcomes)} attempts")
            if job.is_done():
                job.finish()
                del waiting[episode.task_id]


def _settings(config: DemosConfig, model: TaskModel) -> dict[str, Any]:
    """Return what the content of a task's file depends on, as plain JSON data."""
    return {
        "format": FORMAT,
        "suite": model.task.suite,
        "task_id": model.task.task_id,
        "num_demos": config.num_demos,
        "seed": config.seed,
        "noise": config.noise,
        "vla": None if config.vla is None else _identity(config.vla),
        "image_size": config.image_size,
        **{k: v for k, v in config.env_kwargs().items() if k != "assets"},
        "pack": model.assets.name,
        "pack_digest": model.assets.digest,
        "versions": dict(package_versions()),
    }


def _check_settings(path: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Check that a file or folder was made with the settings asked for.

    Raises:
        ConfigError: If not.
    """
    different = {k: (found.get(k), value) for k, value in wanted.items() if found.get(k) != value}
    if different:
        raise ConfigError(
            f"{path} was recorded with other settings (there, asked for): {different}. "
            "Choose another output folder or set overwrite."
        )
