"""``vla-gym-train COMMAND``: the trainers' commands, see :data:`COMMANDS`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

from vla_gym.cli.main import COMPLETION, EXIT_OK, EXIT_USAGE, run_command
from vla_gym.cli.pipes import outlive_readers
from vla_gym_trainers.commands import import_sb3
from vla_gym_trainers.runs.settings import parse_config

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
        "PPO on the VLA's own action tokens or on its RL token (--policy); runs under torchrun",
        "on_policy.config:PPOConfig",
        "on_policy.train:main",
    ),
    "grpo": (
        "GRPO on the same; runs under torchrun",
        "on_policy.config:GRPOConfig",
        "on_policy.train:main",
    ),
}
USAGE = (
    "usage: vla-gym-train COMMAND [--preset NAME|FILE.yaml | --resume RUN] [options]\n\ncommands:\n"
    + "".join(f"  {name:<13}{help_}\n" for name, (help_, *_) in COMMANDS.items())
    + "\nOptions of a command, with their defaults: vla-gym-train COMMAND --help\n"
    + f"Completion for bash and zsh: vla-gym-train {COMPLETION}\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Without the program's name; default: the process's.

    Returns:
        Exit status: 0 done, 2 wrong usage or a mistake that the message explains, 130 stopped by
        Ctrl-C or SIGTERM.
    """
    outlive_readers()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return EXIT_OK if arguments else EXIT_USAGE
    command, rest = arguments[0], arguments[1:]
    if command == COMPLETION:
        from vla_gym.cli.completion import completion_script

        parsers = {name: partial(_run, name) for name in COMMANDS}
        sys.stdout.write(completion_script("vla-gym-train", parsers))
        return EXIT_OK
    if command not in COMMANDS:
        sys.stderr.write(f"Unknown command {command!r}: expected {', '.join(COMMANDS)}.\n\n{USAGE}")
        return EXIT_USAGE
    return run_command(partial(_run, command), rest)


def _run(command: str, arguments: Sequence[str]) -> None:
    _, settings, function = COMMANDS[command]
    config = parse_config(_load(settings), arguments, f"vla-gym-train {command}")
    if command == "td3":
        import_sb3()
    text: str = _load(function)(config)
    if text:
        sys.stdout.write(f"{text}\n")


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"vla_gym_trainers.{module}"), attribute)


if __name__ == "__main__":
    sys.exit(main())
