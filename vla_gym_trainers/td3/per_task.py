"""A policy for each task of a suite: trained one after the other, used as one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.errors import ConfigError, WeightsError
from vla_gym_trainers.evaluation.statistics import compare_paired
from vla_gym_trainers.runs.result_card import make_card, write_json
from vla_gym_trainers.runs.run_dir import RunDir
from vla_gym_trainers.runs.stopping import advice

if TYPE_CHECKING:
    from vla_gym_trainers.td3.config import TD3Config

_FOLDER = "task_"


class PerTaskPolicy:
    """Plays each observation with the policy of its task.

    Attributes:
        models: Policies by task, with the same spaces.
        observation_space: Theirs.
        action_space: Theirs.
    """

    def __init__(self, models: Mapping[int, Any]) -> None:
        """Join policies.

        Raises:
            ConfigError: If there are none, or their spaces differ.
        """
        if not models:
            raise ConfigError("No task has a policy.")
        self.models = dict(models)
        first = next(iter(self.models.values()))
        self.observation_space, self.action_space = first.observation_space, first.action_space
        for task, model in self.models.items():
            if (model.observation_space, model.action_space) != (
                self.observation_space,
                self.action_space,
            ):
                raise ConfigError(f"The policy of task {task} has other spaces than the others.")

    @property
    def guarded_tasks(self) -> tuple[int, ...]:
        """Tasks that the VLA plays; see ``runs.guard``."""
        return tuple(t for t, model in self.models.items() if t in model.guarded_tasks)

    def predict(
        self, observation: Mapping[str, Any], *, deterministic: bool = True
    ) -> tuple[np.ndarray, None]:
        """Return the chunk of one observation, or those of a batch; see SB3's ``predict``.

        Raises:
            ConfigError: If a task has no policy.
        """
        tasks = np.asarray(observation["task_id"])
        if tasks.ndim == 0:
            return self._of(int(tasks)).predict(observation, deterministic=deterministic)[0], None
        tasks = tasks.reshape(-1)
        actions = np.zeros(np.shape(observation["vla_action"]), np.float32)
        for task in np.unique(tasks).tolist():
            rows = tasks == task
            part = {key: np.asarray(value)[rows] for key, value in observation.items()}
            actions[rows] = self._of(task).predict(part, deterministic=deterministic)[0]
        return actions, None

    def _of(self, task: int) -> Any:
        if task not in self.models:
            raise ConfigError(f"There are policies for tasks {sorted(self.models)}, not {task}.")
        return self.models[task]


def task_folders(run_dir: Path) -> dict[int, Path]:
    """Return the run directories of the tasks inside a run directory; empty if it is no such."""
    folders = {}
    for path in sorted(run_dir.glob(f"{_FOLDER}*")):
        number = path.name.removeprefix(_FOLDER)
        if path.is_dir() and number.isdigit():
            folders[int(number)] = path
    return folders


def policy_files(path: Path) -> list[Path]:
    """Return the policy files of a .zip, of a run directory, or of one with a policy a task."""
    if not path.is_dir() or (path / "policy.zip").is_file():
        return [path / "policy.zip" if path.is_dir() else path]
    return [folder / "policy.zip" for folder in task_folders(path).values()] or [
        path / "policy.zip"
    ]


def load_per_task(run_dir: Path, load: Callable[[Path], Any]) -> PerTaskPolicy:
    """Load the policies of a run directory.

    Args:
        run_dir: It holds ``task_00/policy.zip``, ...
        load: Loads one of them.

    Raises:
        WeightsError: If one is missing or damaged.
    """
    folders = task_folders(run_dir)
    if not folders:
        raise WeightsError(f"{run_dir} holds no policies of tasks.")
    return PerTaskPolicy({task: load(folder) for task, folder in folders.items()})


def train_per_task(
    config: TD3Config, run_dir: Path, train: Callable[[TD3Config, Path], dict[str, Any]]
) -> dict[str, Any]:
    """Train the tasks one after the other, each in a run directory of its own, and join the cards.

    A task that has its card is done, one that has begun goes on: calling this again resumes.

    Args:
        config: Settings; limits (chunks, minutes) are those of each task.
        run_dir: Gets ``config.json``, ``task_00/``, ... and ``card.json``.
        train: Trains, or goes on with, one run, and returns its card.

    Returns:
        The joint card.

    Raises:
        KeyboardInterrupt: After a signal; its text says how to go on.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    write_json(run_dir / "config.json", config)
    cards: dict[int, dict[str, Any]] = {}
    for task in sorted(set(config.task_ids)):
        folder = run_dir / f"{_FOLDER}{task:02d}"
        part = dataclasses.replace(config, task_ids=(task,), per_task=False, run_dir=folder)
        card_file = folder / "card.json"
        if not card_file.is_file():
            try:
                train(part, folder)
            except KeyboardInterrupt as error:
                raise KeyboardInterrupt(advice(RunDir(run_dir), "td3")) from error
        cards[task] = json.loads(card_file.read_text(encoding="utf-8"))
    card = make_card(
        "td3",
        config=config,
        seeds={"run": config.seed},
        environment=next(iter(cards.values()))["environment"],
        results=_join({task: card["results"] for task, card in cards.items()}),
    )
    write_json(run_dir / "card.json", card)
    return card


def _join(results: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Join the results of the tasks, as if one policy had played them all."""
    joint: dict[str, Any] = {
        "training": {str(task): result["training"] for task, result in results.items()}
    }
    for key in ("vla", "policy", "paired"):
        rows = [row for result in results.values() for row in result.get(key, ())]
        if rows:
            joint[key] = rows
    if "policy" in joint and len(joint["policy"]) > 1:
        joint["paired_all_tasks"] = compare_paired(
            [ok for row in joint["policy"] for ok in row["successes"]],
            [ok for row in joint["vla"] for ok in row["successes"]],
        )
    guards = [result["guard"] for result in results.values() if "guard" in result]
    if guards:
        joint["guard"] = {
            "num_guarded": sum(guard["num_guarded"] for guard in guards),
            "guarded_tasks": [task for guard in guards for task in guard["guarded_tasks"]],
            "by_task": [row for guard in guards for row in guard["by_task"]],
        }
    return joint
