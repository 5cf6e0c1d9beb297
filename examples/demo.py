"""The whole chain in one run: what `make demo` shows within 10 minutes on two cores.

1. a report on this machine;
2. videos of the scripted expert and of the frozen VLA on the task;
3. TD3+BC on the RL token, starting at the VLA, on freshly sampled layouts;
4. both on the same official initial states, and an exact paired test;
5. a video of a state that only the trained policy solves.

Everything lands in one run directory. Run it with --help for the options.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# One thread for numerical libraries: the training loop already learns in a second thread while it
# collects, and more of them fight for two cores.
for _variable in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from rich.console import Console  # noqa: E402

from vla_gym.cli.doctor import as_json, print_report, run_checks  # noqa: E402
from vla_gym.cli.main import run_command  # noqa: E402
from vla_gym.errors import ConfigError  # noqa: E402
from vla_gym.suites import get_task  # noqa: E402

console = Console()


@dataclass
class DemoConfig:
    """Train TD3+BC from the embedded VLA on one task of libero_goal, and show what it changed."""

    preset: str = "td3_demo"
    """Training settings: a preset's name or a yaml file."""
    task_id: int | None = None
    """Another task of the suite than the preset's."""
    assets: str | None = None
    """Another asset pack than the preset's, whose lite one is drawn four times as fast: libero."""
    minutes: float | None = None
    """Another limit of training time than the preset's, in minutes."""
    eval_states: int | None = None
    """Another number of official states for the evaluation (1..50) than the preset's."""
    seed: int = 0
    """Seed of training."""
    run_dir: Path | None = None
    """Where everything goes; default: runs/demo-<time>."""


def main(config: DemoConfig) -> int:
    """Run the demo and return the exit status."""
    started = time.perf_counter()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    run_dir = config.run_dir or Path("runs") / f"demo-{stamp}"
    run_dir.mkdir(parents=True, exist_ok=True)

    with stage("This machine"):
        findings = run_checks(quick=True)
        print_report(findings)
        (run_dir / "doctor.json").write_text(json.dumps(as_json(findings), indent=2) + "\n")
        if not as_json(findings)["ok"]:
            console.print("Mend what is marked 'fail', then start again.", style="bold red")
            return 1

    from vla_gym_trainers.td3.train import train_td3

    settings = training_settings(config, run_dir)
    task = get_task(settings.suite, settings.task_ids[0])
    console.print(f"\nTask: [bold]{task.instruction}[/bold] (libero_{task.suite}, {task.task_id})")

    with stage("Videos: the scripted expert and the frozen VLA (the first use compiles the scene)"):
        record_start(settings, run_dir)
    with stage("TD3+BC on sampled layouts, then both on the same official states"):
        run = train_td3(settings)
    # Read back what was written, so that the table shows what the file says.
    results = json.loads((run.run_dir / "card.json").read_text(encoding="utf-8"))["results"]
    with stage("Videos: a state that only the trained policy solves"):
        record_win(settings, results, run_dir)

    show_results(results)
    minutes = (time.perf_counter() - started) / 60
    console.print(f"Everything is in [bold]{run_dir}[/bold] ({minutes:.1f} minutes in all):")
    for name, meaning in (
        ("*.mp4", "videos"),
        ("card.json", "result card: figures, versions, GL renderer, asset pack, seeds"),
        ("policy.safetensors", "the policy; `vla-gym eval --policy` plays it"),
        ("tensorboard/", "training curves"),
    ):
        console.print(f"  {name:<13} {meaning}", highlight=False)
    return 0


@contextmanager
def stage(title: str) -> Iterator[None]:
    """Show a heading, and at the end how long the stage took."""
    console.rule(f"[bold]{title}", align="left")
    started = time.perf_counter()
    yield
    console.print(f"({time.perf_counter() - started:.0f} s)", style="dim")


def training_settings(config: DemoConfig, run_dir: Path) -> Any:
    """Return the preset's settings with the command line's changes."""
    from vla_gym_trainers.runs.settings import load_preset
    from vla_gym_trainers.td3.train import TD3RunConfig

    settings = load_preset(TD3RunConfig, config.preset)
    changes = {
        "task_ids": None if config.task_id is None else (config.task_id,),
        "assets": config.assets,
        "max_minutes": config.minutes,
        "eval_states": config.eval_states,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    settings = dataclasses.replace(settings, run_dir=run_dir, seed=config.seed, **changes)
    if len(settings.task_ids or ()) != 1:
        raise ConfigError(
            f"{config.preset} trains on several tasks, the demo is about one: give --task-id."
        )
    if settings.eval_states == 0:
        raise ConfigError("The demo compares on official states: give --eval-states, such as 50.")
    return settings


def record(settings: Any, start: Any, players: dict[str, Any], run_dir: Path, name: str) -> None:
    """Film an episode of each player from the same start, and say what came of it."""
    from vla_gym.rollout.film import record_video

    for who, player in players.items():
        path = run_dir / name.format(who)
        (episode,) = record_video(
            path, player, [start], assets=settings.assets, physics=settings.physics
        )
        outcome = "[green]success[/green]" if episode.success else "[red]no success[/red]"
        console.print(f"  {path}: {outcome}", highlight=False)


def record_start(settings: Any, run_dir: Path) -> None:
    """Record the expert and the VLA on the first official state."""
    from vla_gym.rollout import ExpertPolicy, Start
    from vla_gym.rollout.vla_policy import VLAPolicy

    start = Start(settings.suite, settings.task_ids[0], 0)
    vla = VLAPolicy(settings.vla, chunk_len=settings.chunk_len)
    record(settings, start, {"expert": ExpertPolicy(), "vla": vla}, run_dir, "{}.mp4")


def record_win(settings: Any, results: dict[str, Any], run_dir: Path) -> None:
    """Record VLA and policy on the first state where only the policy succeeded, if there is one."""
    from vla_gym.rollout import Start
    from vla_gym.rollout.vla_policy import VLAPolicy
    from vla_gym_trainers.evaluation.trained import load_trained

    both = (results["evaluation"][who]["episodes"] for who in ("policy", "start"))
    wins = [
        mine["init_state_id"]
        for mine, vla in zip(*both, strict=True)
        if mine["success"] and not vla["success"]
    ]
    if not wins:
        console.print("There is none in this run.")
        return
    trained = load_trained(run_dir)
    players = {
        "vla": VLAPolicy(settings.vla, chunk_len=trained.chunk_len),
        "policy": trained,
    }
    start = Start(settings.suite, settings.task_ids[0], wins[0])
    record(settings, start, players, run_dir, f"state{wins[0]:02d}_{{}}.mp4")


def show_results(results: dict[str, Any]) -> None:
    """Show both success rates with their intervals, and the paired test."""
    from vla_gym_trainers.evaluation.tables import print_results

    for who, title in (("start", "Frozen VLA"), ("policy", "TD3+BC, on the same states")):
        print_results(results["evaluation"][who], f"{title}: greedy, official states")


if __name__ == "__main__":
    import tyro

    logging.basicConfig(level=logging.WARNING)
    settings = tyro.cli(DemoConfig, description=__doc__)
    sys.exit(run_command(lambda _: main(settings), []))
