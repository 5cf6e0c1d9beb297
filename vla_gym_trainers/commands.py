"""Commands of ``vla-gym`` that need the trainers: found as entry points ``vla_gym.commands``."""

from __future__ import annotations

from collections.abc import Sequence

from vla_gym.cli.options import parse_options


def play(arguments: Sequence[str]) -> int:
    """A video of the expert, the VLA, random actions or a trained policy, tiled."""
    from vla_gym_trainers.evaluation.play import PlayConfig, main

    return main(parse_options(PlayConfig, arguments, "play"))


def evaluate(arguments: Sequence[str]) -> int:
    """Success rates of the VLA, a trained policy, the experts on the official initial states."""
    from vla_gym_trainers.evaluation.command import main
    from vla_gym_trainers.evaluation.config import EvalConfig

    return main(parse_options(EvalConfig, arguments, "eval"))


def merge(arguments: Sequence[str]) -> int:
    """Put the result cards of shards together."""
    from vla_gym_trainers.evaluation.config import MergeConfig
    from vla_gym_trainers.evaluation.merge_command import main_merge

    return main_merge(parse_options(MergeConfig, arguments, "eval-merge"))


def report(arguments: Sequence[str]) -> int:
    """One HTML page about training runs and result cards."""
    from vla_gym_trainers.report.command import ReportConfig, main

    return main(parse_options(ReportConfig, arguments, "report"))
