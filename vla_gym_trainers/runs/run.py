"""One training run: directory, log, checkpoints, limits and end, the same for every trainer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vla_gym.errors import ConfigError
from vla_gym_trainers.runs.metrics import RunLogger
from vla_gym_trainers.runs.result_card import make_card, write_json
from vla_gym_trainers.runs.run_dir import FORMAT, Checkpoint, RunDir
from vla_gym_trainers.runs.settings import (
    CheckpointSettings,
    RunSettings,
    check_resumable,
    default_run_dir,
    read_settings,
    run_of,
)
from vla_gym_trainers.runs.stopping import stoppable


@dataclass(frozen=True)
class TrainingRun:
    """What a training run leaves: its directory, see :class:`.run_dir.RunDir`, and result card."""

    run_dir: Path
    card: dict[str, Any]


class Run:
    """What a trainer does beside training, in a few calls.

    The shape of a trainer::

        with Run(config, total=config.total_chunks, unit="chunk") as run:
            trainer = Trainer(config)
            if run.checkpoint is not None:
                trainer.load(run.checkpoint.folder, run.checkpoint.state)
            with run.training():
                while not run.is_over(trainer.step):
                    run.log(trainer.iterate(), trainer.step)
                    run.show(trainer.step, success=trainer.success_rate)
                    if run.is_checkpoint_due(trainer.step):
                        with run.new_checkpoint(trainer.step, trainer.state()) as folder:
                            trainer.save(folder)
            run.write_card(results, environment)

    Ctrl-C and SIGTERM end the block of :meth:`training` between two iterations: the trainer sees
    :meth:`is_over`. Elsewhere, and the second time, they end the run at once. Either way the
    message says how to go on, as it does when the disk is full.

    Attributes:
        config: The settings.
        dir: Names of the run's files.
        checkpoint: Where the run goes on; None where it begins.
        total: Steps of the whole run.
        limits: The settings again; defaults for a trainer without checkpoints.
        logger: Takes metrics.
        stop: Whether a signal came; see :class:`~vla_gym_trainers.runs.stopping.StopRequest`.
    """

    def __init__(
        self, config: RunSettings, *, total: int, unit: str = "step", is_main: bool = True
    ) -> None:
        """Find the run's directory and where it goes on.

        Steps are in the unit that checkpoints and metrics count. Further processes of a
        data-parallel run, where ``is_main`` is False, write nothing.

        Raises:
            ConfigError: If the directory holds another run, or settings differ that must not.
            WeightsError: If the checkpoint is damaged.
        """
        self.config, self.total, self.unit, self.is_main = config, total, unit, is_main
        self.limits = config if isinstance(config, CheckpointSettings) else CheckpointSettings()
        self.dir, self.checkpoint = _find(config, self.limits)
        before = {} if self.checkpoint is None else self.checkpoint.run
        self._first = 0 if self.checkpoint is None else self.checkpoint.step
        self._seconds_before = float(before.get("seconds", 0.0))
        self._next_film = int(before.get("next_film", self.limits.film_every))
        self.plan_checkpoint(self._first)
        self._started, self._stack = time.perf_counter(), ExitStack()
        self.logger: Any = None
        self._bar: Any = None

    def __enter__(self) -> Run:
        """Lock the directory, write the settings and open the log."""
        with ExitStack() as stack:
            command = self.config.algorithm if self.limits is self.config else None
            self.stop = stack.enter_context(stoppable(self.dir, command))
            if self.is_main:
                stack.enter_context(self.dir.lock())
                self.dir.go_back_to(None if self.checkpoint is None else self.checkpoint.folder)
                write_json(self.dir.config, self.config)
                logged = None if self.checkpoint is None else self.checkpoint.run["logger"]
                self.logger = RunLogger(
                    self.dir.metrics, self.dir.tensorboard, logged, self.config.wandb
                )
                stack.enter_context(closing(self.logger))
            self._stack = stack.pop_all()
        self._started = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    # Limits

    @contextmanager
    def training(self) -> Iterator[None]:
        """Within the block a first signal only ends the loop; see :meth:`is_over`.

        Raises:
            KeyboardInterrupt: At the end of the block, if a signal came.
        """
        hidden = not (self.config.progress and self.is_main)
        bar = tqdm(total=self.total, initial=self._first, unit=self.unit, disable=hidden)
        with self.stop.deferred(), bar as self._bar:
            yield

    @property
    def seconds(self) -> float:
        """Seconds so far, those before the run was resumed included."""
        return self._seconds_before + time.perf_counter() - self._started

    @property
    def is_late(self) -> bool:
        """Whether the wall-time limit has passed."""
        limit = self.limits.max_minutes
        return limit is not None and self.seconds >= 60.0 * limit

    def is_over(self, step: int) -> bool:
        """Tell whether training ends here: all steps done, time over, or a signal came."""
        return step >= self.total or self.is_late or self.stop.is_made

    # Log

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write metrics, together with what was recorded in :attr:`logger`."""
        if self.logger is not None:
            for key, value in metrics.items():
                self.logger.record(key, value)
            self.logger.dump(step)

    def show(self, step: int, success: float | None = None, phase: str = "") -> None:
        """Move the progress bar of :meth:`training`, with the success of recent episodes."""
        self._bar.set_description(phase or self.config.algorithm, refresh=False)
        if success is not None:
            self._bar.set_postfix(success=f"{success:.2f}", refresh=False)
        self._bar.update(step - self._bar.n)

    # Checkpoints and films

    def is_checkpoint_due(self, step: int) -> bool:
        """Tell whether a checkpoint's step is passed (by threshold: steps come in batches)."""
        return step >= self._next_checkpoint

    @contextmanager
    def new_checkpoint(self, step: int, state: Mapping[str, Any]) -> Iterator[Path]:
        """Give a folder to write the trainer's files into; nothing may be under way.

        The state is plain data, which comes back as :attr:`Checkpoint.state`.
        """
        self.plan_checkpoint(step)
        with self.dir.new_checkpoint(step, self.limits.keep_checkpoints) as folder:
            yield folder
            # Last: what the trainer records while it saves belongs to the logger's state.
            run = {
                "seconds": self.seconds,
                "next_film": self._next_film,
                "logger": self.logger.state(step),
            }
            content = {"format": FORMAT, "step": step, "run": run, "trainer": dict(state)}
            self.dir.keep_best(folder)
            write_json(folder / "state.json", content)

    def plan_checkpoint(self, step: int) -> None:
        """Set when the next checkpoint is due; for further processes, which write none."""
        every = self.limits.checkpoint_every
        self._next_checkpoint = (step // every + 1) * every

    def film_if_due(self, episodes: int, film: Callable[[Path], None]) -> None:
        """Film the policy if ``film_every`` training episodes have passed since the last film.

        ``film`` plays the policy and writes the film to a path; it must leave the training's
        environments and random generators alone.
        """
        every = self.limits.film_every
        if not every or not self.is_main or episodes < self._next_film:
            return
        self._next_film = (episodes // every + 1) * every
        self.dir.videos.mkdir(exist_ok=True)
        film(self.dir.videos / f"episode_{episodes:07d}.mp4")

    # End

    def throughput(self, step: int) -> dict[str, float]:
        """Return minutes and steps per second for the result card."""
        rate = step / max(self.seconds, 1e-9)
        return {"minutes": round(self.seconds / 60, 3), f"{self.unit}s_per_second": round(rate, 2)}

    def write_card(
        self, results: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write and return the result card; see :func:`.result_card.make_card`."""
        card = make_card(
            self.config.algorithm,
            config=self.config,
            seeds={"run": getattr(self.config, "seed", None)},
            environment=dict(environment),
            results=dict(results),
        )
        write_json(self.dir.card, card)
        return card


def _find(config: RunSettings, limits: CheckpointSettings) -> tuple[RunDir, Checkpoint | None]:
    """Return the run's directory and the checkpoint that it goes on from."""
    if limits.auto_resume and config.run_dir is None:
        raise ConfigError("--auto-resume needs a --run-dir: a new name never holds a run.")
    path, chosen = config.run_dir or default_run_dir(config), None
    if limits.resume is not None:
        path, chosen = run_of(limits.resume)
        if config.run_dir not in (None, path):
            raise ConfigError(f"A resumed run stays in its folder {path}: leave --run-dir out.")
    run = RunDir(path)
    whole = run.checkpoints()
    if limits is config and not whole and run.card.is_file():
        raise ConfigError(
            f"{path} holds a run that is over, and no checkpoint to go on from: give another "
            "--run-dir, or delete the folder."
        )
    if limits.resume is None and not limits.auto_resume:
        if whole:
            raise ConfigError(
                f"{path} holds a run already: go on with 'vla-gym-train {config.algorithm} "
                f"--resume {path}', or give another --run-dir."
            )
        return run, None
    if limits.resume is not None or whole:
        check_resumable(read_settings(run.config, type(limits)), limits)
    if chosen is not None and chosen not in whole:
        names = ", ".join(p.name for p in whole) or "none"
        raise ConfigError(f"{chosen} is no whole checkpoint; there are: {names}.")
    found = chosen or (whole[-1] if whole else None)
    return run, None if found is None else Checkpoint.read(found)
