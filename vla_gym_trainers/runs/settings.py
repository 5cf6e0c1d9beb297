"""Settings that every training run has, and where a command takes its settings from.

A command's defaults are those of its dataclass, those of a preset, or those of a run that goes on;
options on the command line come last.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.resources
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from vla_gym.cli.options import check_words
from vla_gym.errors import ConfigError
from vla_gym.outside import (
    Count,
    NonNegativeFloat,
    Object,
    PositiveInt,
    read_json,
    read_yaml,
    to_type,
)

Config = TypeVar("Config", bound=Any)


#: Added to a run's seed for the layouts of its evaluations: training seeds are far smaller.
EVAL_SEED = 1_000_000_000
#: Of the layouts that stand in for official states where a suite has none: no run has seen them.
TEST_SEED = 2_000_000_000
#: Settings that tell of which command a run is: the first one that it has.
_TOLD_BY = {
    "explorer": "adversarial",
    "teacher": "explorer",
    "gae_lambda": "ppo",
    "baseline": "grpo",
    "critic_warmup_steps": "td3",
    "tokenizer_steps": "world-model",
    "demos_per_task": "mini",
}


@dataclass
class RunSettings:
    """Directory and logs of a run; base of the trainers' settings."""

    #: Command of ``vla-gym-train``; names run directories and result cards.
    algorithm: ClassVar[str] = ""
    #: Names of its presets where they do not begin with ``algorithm``.
    presets: ClassVar[tuple[str, ...]] = ()

    run_dir: Path | None = None
    """Run directory; None for runs/<command>-<suite>-<tasks>-<time>."""
    wandb: str | None = None
    """Project of Weights & Biases that metrics also go to; TensorBoard is always written."""
    progress: bool = True
    """Show progress bars."""


@dataclass
class CheckpointSettings(RunSettings):
    """Limits, checkpoints and films of a run that can go on."""

    #: Settings that a resumed run may change: nothing that its result depends on.
    resumable: ClassVar[tuple[str, ...]] = (
        "max_minutes",
        "keep_checkpoints",
        "film_every",
        "wandb",
        "progress",
        "run_dir",
    )

    resume: Path | None = field(default=None, metadata={"saved": False})
    """Go on with this run, or from one of its checkpoints (RUN/checkpoints/NUMBER; what the run did
    after that one is dropped). Settings are the run's; few may change. td3's checkpoints hold
    pickles: resume runs of your own only."""
    auto_resume: bool = field(default=False, metadata={"saved": False})
    """Go on with the run in run_dir if it has a checkpoint, begin it otherwise."""
    max_minutes: NonNegativeFloat | None = None
    """Stop training after this wall time, if it comes first; None for no limit."""
    checkpoint_every: PositiveInt = 5000
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that stay."""
    film_every: Count = 0
    """Training episodes between sample films of the policy in videos/; 0 for none."""


def default_run_dir(config: Any) -> Path:
    """Return ``runs/<algorithm>-<suite>-<tasks>-<time>``, without what the settings lack."""
    parts = [config.algorithm]
    if isinstance(suite := getattr(config, "suite", None), str):
        parts.append(suite)
    if tasks := getattr(config, "task_ids", None):
        parts.append("_".join(map(str, tasks)))
    parts.append(datetime.datetime.now().strftime("%Y%m%d-%H%M%S"))
    return Path("runs") / "-".join(parts)


# The command line


@contextmanager
def needs_trainers() -> Iterator[None]:
    """Import what the trainers' extra installs; a ConfigError says so where it is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("vla_gym"):
            raise
        raise ConfigError(
            f"This command needs the trainers ({error}): pip install 'vla-gym[trainers]'"
        ) from error


@dataclass
class _Source:
    preset: str | None = None
    resume: Path | None = None


def parse_config(kind: type[Config], arguments: Sequence[str], prog: str | None = None) -> Config:
    """Read the settings of a command: defaults < preset or resumed run < options.

    Their dataclass has a docstring below each field; ``prog`` is the command, for ``--help``.

    Raises:
        ConfigError: If the preset or the run does not exist or does not fit.
    """
    import tyro

    check_words(arguments)
    source, rest = tyro.cli(_Source, args=list(arguments), return_unknown_args=True, add_help=False)
    settings: dict[str, Any] = {}
    if source.resume is not None:
        if not issubclass(kind, CheckpointSettings):
            raise ConfigError("This command has no checkpoints: leave --resume out.")
        if source.preset is not None:
            raise ConfigError("A resumed run has its settings: leave --preset out.")
        settings["default"] = load_run_settings(source.resume, kind)
    elif source.preset is not None:
        settings["default"] = load_preset(kind, source.preset)
    description = inspect.cleandoc(kind.__doc__ or "")
    if names := ", ".join(presets_of(kind)):
        description += f"\n\n--preset NAME|FILE.yaml sets defaults; names: {names}."
    return tyro.cli(kind, args=rest, prog=prog, description=description, **settings)


def presets_of(kind: type[Any]) -> tuple[str, ...]:
    """Return the names of the shipped presets of a dataclass of settings."""
    stem = str(getattr(kind, "algorithm", "")).replace("-", "_")
    mine = tuple(name for name in preset_names() if stem and name.startswith(stem))
    return getattr(kind, "presets", ()) or mine


def preset_names() -> list[str]:
    """Return the names of the presets that ship with the package."""
    files = importlib.resources.files("vla_gym.configs").iterdir()
    return sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml"))


def load_preset(kind: type[Config], preset: str) -> Config:
    """Return the settings of a shipped preset, or of a yaml file with field names as keys.

    Raises:
        ConfigError: If it does not exist, is not a mapping, has unknown keys, or names a class as
            the VLA: a preset from elsewhere must not choose what is imported.
    """
    file: Any = Path(preset)
    if not preset.endswith(".yaml"):
        file = importlib.resources.files("vla_gym.configs") / f"{preset}.yaml"
    if not file.is_file():
        raise ConfigError(
            f"There is no preset {preset!r}: expected one of "
            f"{', '.join(presets_of(kind) or preset_names())} or the path of a file that ends in "
            ".yaml."
        )
    origin = f"Preset {preset}"
    values = read_yaml(file, Object, advice="A preset maps field names to values.")
    for key in ("vla", "world_model", "teacher"):
        if str(values.get(key, "")).startswith("class:"):
            raise ConfigError(
                f"{origin} names a class to import as its {key}: only the command line "
                f"may, with --{key.replace('_', '-')}."
            )
    return to_type(values, kind, origin)


# Runs that go on


def run_of(path: Path) -> tuple[Path, Path | None]:
    """Return the run directory that ``--resume`` names, and the checkpoint, if it names one."""
    if path.parent.name == "checkpoints":
        return path.parent.parent, path
    return path, None


def load_run_settings(path: Path, kind: type[Config]) -> Config:
    """Return the settings of a run, to go on with it or with one of its checkpoints.

    A setting that the run lacks takes its default.

    Raises:
        ConfigError: If there is no run of this command.
    """
    settings = read_settings(run_of(path)[0] / "config.json", kind)
    return dataclasses.replace(settings, resume=path)


def read_settings(path: Path, kind: type[Config]) -> Config:
    """Read the ``config.json`` of a run; its folder becomes ``run_dir``.

    Raises:
        ConfigError: If the file is missing, is none, is another command's, or has settings that
            ``kind`` lacks.
    """
    origin = f"{path}, read as settings of 'vla-gym-train {kind.algorithm}',"
    values = read_json(path, Object, advice="Expected the config.json of a run.")
    known = kind.algorithm in _TOLD_BY.values()
    if known and (command := command_of(values)) not in (None, kind.algorithm):
        raise ConfigError(
            f"{path} is of 'vla-gym-train {command}', not of {kind.algorithm!r}: use that command, "
            "or name another run."
        )
    values["run_dir"] = str(path.parent)
    return to_type(values, kind, origin)


def command_of(settings: Mapping[str, Any]) -> str | None:
    """Return which command a run's settings are of; None if they are of none that is known here."""
    return next((command for name, command in _TOLD_BY.items() if name in settings), None)


def check_run(run: Path, commands: Sequence[str], option: str) -> None:
    """Check that an option names a run of one of these commands.

    Raises:
        ConfigError: If it is no run, or one of another command.
    """
    file = run / "config.json"
    found = command_of(read_json(file, Object)) if file.is_file() else None
    if found not in commands:
        wanted = " or ".join(f"'vla-gym-train {command}'" for command in commands)
        what = f"one of {found!r}" if found else "none"
        raise ConfigError(f"{option} {run}: expected a run of {wanted}, this is {what}.")


def check_resumable(old: CheckpointSettings, new: CheckpointSettings) -> None:
    """Check that a run of ``old`` may go on with ``new``.

    Raises:
        ConfigError: If a setting differs that is not in ``new.resumable``.
    """
    for item in dataclasses.fields(old):
        before, after = getattr(old, item.name), getattr(new, item.name)
        saved = item.metadata.get("saved", True)
        if saved and before != after and item.name not in new.resumable:
            free = ", ".join(name for name in new.resumable if name != "run_dir")
            raise ConfigError(
                f"The run has {item.name}={before!r}, not {after!r}: a resumed run may change "
                f"{free} only. Start a new one in another --run-dir."
            )
