"""``vla-gym-train td3`` from the command line."""

from __future__ import annotations

from vla_gym_trainers.commands import import_sb3
from vla_gym_trainers.td3.config import TD3RunConfig


def main(config: TD3RunConfig) -> str:
    """Train; return what is printed."""
    import_sb3()
    from vla_gym_trainers.evaluation.eval_result import format_table
    from vla_gym_trainers.td3.train import train_td3

    run = train_td3(config)
    table = f"{format_table(run.card)}\n" if "vla" in run.card["results"] else ""
    return f"{table}run directory: {run.run_dir}"
