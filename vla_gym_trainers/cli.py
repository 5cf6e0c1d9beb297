"""``vla-gym-train COMMAND``: the trainers' commands, see :data:`COMMANDS`, and those of plug-ins.

An entry point of the group ``vla_gym_trainers.commands`` names a function from its settings, whose
dataclass is the type of its argument, to the text that is printed (docs/extending.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, get_type_hints

from vla_gym.cli.main import COMPLETION, run_program
from vla_gym.errors import ConfigError
from vla_gym_trainers.runs.settings import needs_trainers, parse_config

#: Commands: what each is for, its settings and its function, imported when the command runs (torch
#: alone takes seconds). A function takes the settings and returns what is printed.
COMMANDS = {
    "mini": (
        "behaviour-clone the embedded VLA from recorded demonstrations",
        "cloning.config:MiniConfig",
        "cloning.train:main",
    ),
    "rl-token": (
        "pretrain the RL-token encoder of a VLA",
        "rl_token.train:RLTokenConfig",
        "rl_token.train:main",
    ),
    "probe": (
        "what an RL token keeps of the scene, told by linear probes",
        "rl_token.probes:ProbeConfig",
        "rl_token.probes:main",
    ),
    "world-model": (
        "F1's world model: a memory that predicts what the wrist camera will see",
        "world_model.config:WorldModelConfig",
        "world_model.train:main",
    ),
    "explorer": (
        "F1's phase 2: PPO of a VLA that sees the wrist alone, paid by a world model",
        "explorer.config:ExplorerConfig",
        "explorer.train:main",
    ),
    "adversarial": (
        "F1's phase 3: the explorer and the world model against each other",
        "explorer.config:AdversarialConfig",
        "explorer.train:main",
    ),
    "td3": (
        "TD3+BC on LIBERO tasks, starting at the frozen VLA",
        "td3.config:TD3RunConfig",
        "td3.train:main",
    ),
    "ppo": (
        "PPO on the VLA itself or on its RL token (--policy); runs under torchrun",
        "on_policy.config:PPOConfig",
        "on_policy.train:main",
    ),
    "grpo": (
        "GRPO on the same; runs under torchrun",
        "on_policy.config:GRPOConfig",
        "on_policy.train:main",
    ),
}
GROUP = "vla_gym_trainers.commands"


def plugins() -> dict[str, EntryPoint]:
    """Return the commands of other packages by name; none replaces one of this package."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in COMMANDS}


def usage() -> str:
    """Return the list of commands."""
    helps = {name: help_ for name, (help_, *_) in COMMANDS.items()}
    # Not imported for this: one that cannot be imported must not hide the others.
    helps |= {name: f"of {point.value.partition(':')[0]}" for name, point in plugins().items()}
    return (
        "usage: vla-gym-train COMMAND [--preset NAME|FILE.yaml | --resume RUN] [options]\n\n"
        "commands:\n"
        + "".join(f"  {name:<13}{help_}\n" for name, help_ in helps.items())
        + "\nOptions of a command, with their defaults: vla-gym-train COMMAND --help\n"
        + f"Completion for bash and zsh: vla-gym-train {COMPLETION}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``vla-gym-train``; see :func:`vla_gym.cli.main.run_program`."""
    commands = {name: partial(_run, name) for name in (*COMMANDS, *plugins())}
    return run_program("vla-gym-train", commands, usage, arguments)


def _run(command: str, arguments: Sequence[str]) -> None:
    settings, function = _load_command(command)
    config = parse_config(settings, arguments, f"vla-gym-train {command}")
    text: str | None = _load(function)(config) if isinstance(function, str) else function(config)
    if text:
        sys.stdout.write(f"{text}\n")


def _load_command(command: str) -> tuple[Any, Any]:
    """Return the settings' class of a command, and its function or where that is.

    Raises:
        ConfigError: If a plug-in cannot be imported, or is no such function.
    """
    if command in COMMANDS:
        _, settings, function = COMMANDS[command]
        return _load(settings), function
    point = plugins()[command]
    try:
        function = point.load()
        hints = get_type_hints(function)
        hints.pop("return", None)
        [settings] = hints.values()
    except Exception as error:
        raise ConfigError(
            f"The command {command!r} of {point.value} cannot be used: expected a function of one "
            f"argument with the type of its settings, got {type(error).__name__}: {error}"
        ) from error
    return settings, function


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    with needs_trainers():
        return getattr(import_module(f"vla_gym_trainers.{module}"), attribute)


if __name__ == "__main__":
    sys.exit(main())
