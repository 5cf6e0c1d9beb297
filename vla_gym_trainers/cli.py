"""``vla-gym-train mini | rl-token | probe | td3 | critics | ppo-actor | ppo | grpo``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path

from vla_gym.cli.main import run_command
from vla_gym.errors import ConfigError

USAGE = """usage: vla-gym-train COMMAND [--preset NAME|FILE.yaml] [options]

commands:
  mini      behaviour-clone the embedded VLA from recorded demonstrations
  rl-token  pretrain the RL-token encoder of a VLA
  probe     what an RL token keeps of the scene, told by linear probes
  td3       TD3+BC on LIBERO tasks, starting at the frozen VLA; --resume RUN goes on with a run
  critics   whether the critics of a td3 run know episodes they have not seen
  ppo-actor PPO on the RL-token actor, on the same environments; --resume as above
  ppo       PPO on the VLA's own action tokens, with LoRA; --resume as above; torchrun
  grpo      GRPO on the same; --resume as above; torchrun

Options of a command, with their defaults: vla-gym-train COMMAND --help
"""


def _train_td3(arguments: Sequence[str]) -> None:
    # rlinf-libero brings the old `gym`, which SB3 imports if present and which prints a banner.
    with redirect_stderr(StringIO()):
        import stable_baselines3  # noqa: F401
    from vla_gym_trainers.evaluation.evaluate import format_table
    from vla_gym_trainers.runs.presets import parse_config
    from vla_gym_trainers.runs.settings import read_settings
    from vla_gym_trainers.td3.train import TD3Config, resume_td3, train_td3

    rest, run_dir = _take_option(arguments, "--resume")
    if run_dir is None:
        run = train_td3(parse_config(TD3Config, rest, "vla-gym-train td3"))
    else:
        saved = read_settings(Path(run_dir) / "config.json", TD3Config)
        config = parse_config(TD3Config, rest, "vla-gym-train td3 --resume", default=saved)
        run = resume_td3(Path(run_dir), config)
    if "vla" in run.card["results"]:
        sys.stdout.write(format_table(run.card) + "\n")
    sys.stdout.write(f"run directory: {run.run_dir}\n")


def _train_ppo_actor(arguments: Sequence[str]) -> None:
    with redirect_stderr(StringIO()):
        import stable_baselines3  # noqa: F401
    from vla_gym_trainers.evaluation.evaluate import format_table
    from vla_gym_trainers.ppo_actor.config import PPOActorConfig
    from vla_gym_trainers.ppo_actor.train import resume_ppo_actor, train_ppo_actor
    from vla_gym_trainers.runs.presets import parse_config
    from vla_gym_trainers.runs.settings import read_settings

    rest, run_dir = _take_option(arguments, "--resume")
    if run_dir is None:
        run = train_ppo_actor(parse_config(PPOActorConfig, rest, "vla-gym-train ppo-actor"))
    else:
        saved = read_settings(Path(run_dir) / "config.json", PPOActorConfig)
        config = parse_config(PPOActorConfig, rest, "vla-gym-train ppo-actor --resume", saved)
        run = resume_ppo_actor(Path(run_dir), config)
    if "vla" in run.card["results"]:
        sys.stdout.write(format_table(run.card) + "\n")
    sys.stdout.write(f"run directory: {run.run_dir}\n")


def _train_tokens(algorithm: str, arguments: Sequence[str]) -> None:
    rest, run_dir = _take_option(arguments, "--resume")
    with redirect_stderr(StringIO()):
        import stable_baselines3  # noqa: F401
    from vla_gym_trainers.on_policy.command import command

    command(algorithm, rest, run_dir)


def _take_option(arguments: Sequence[str], name: str) -> tuple[list[str], str | None]:
    """Return the arguments without an option and its value, and the value."""
    rest = list(arguments)
    for index, argument in enumerate(rest):
        if argument.startswith(f"{name}="):
            return rest[:index] + rest[index + 1 :], argument.split("=", 1)[1]
        if argument == name:
            if index + 1 == len(rest):
                raise ConfigError(f"{name} needs a value.")
            return rest[:index] + rest[index + 2 :], rest[index + 1]
    return rest, None


def _train_mini(arguments: Sequence[str]) -> None:
    from vla_gym_trainers.cloning.train import MiniConfig, train_mini
    from vla_gym_trainers.runs.presets import parse_config

    train_mini(parse_config(MiniConfig, arguments, "vla-gym-train mini"))


def _train_rl_token(arguments: Sequence[str]) -> None:
    from vla_gym_trainers.rl_token.train import RLTokenConfig, format_reports, train_rl_token
    from vla_gym_trainers.runs.presets import parse_config

    card = train_rl_token(parse_config(RLTokenConfig, arguments, "vla-gym-train rl-token"))
    sys.stdout.write(format_reports(card) + "\n")


def _probe(arguments: Sequence[str]) -> None:
    from vla_gym_trainers.rl_token.probes import ProbeConfig, format_probes, probe_rl_token
    from vla_gym_trainers.runs.presets import parse_config

    card = probe_rl_token(parse_config(ProbeConfig, arguments, "vla-gym-train probe"))
    sys.stdout.write(format_probes(card["results"]) + "\n")


def _critics(arguments: Sequence[str]) -> None:
    with redirect_stderr(StringIO()):
        import stable_baselines3  # noqa: F401
    from vla_gym_trainers.runs.presets import parse_config
    from vla_gym_trainers.td3.critic_check import CriticCheckConfig, check_critics, format_check

    card = check_critics(parse_config(CriticCheckConfig, arguments, "vla-gym-train critics"))
    sys.stdout.write(format_check(card) + "\n")


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "mini": _train_mini,
    "rl-token": _train_rl_token,
    "probe": _probe,
    "td3": _train_td3,
    "critics": _critics,
    "ppo-actor": _train_ppo_actor,
    "ppo": partial(_train_tokens, "ppo"),
    "grpo": partial(_train_tokens, "grpo"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: Without the program's name; default: the process's.

    Returns:
        Exit status: 0 done, 2 wrong usage or a mistake that the message explains, 130 stopped by
        Ctrl-C or SIGTERM.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(USAGE)
        return 0 if arguments else 2
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        sys.stderr.write(f"Unknown command {command!r}: expected {', '.join(COMMANDS)}.\n\n{USAGE}")
        return 2
    return run_command(COMMANDS[command], rest)


if __name__ == "__main__":
    sys.exit(main())
