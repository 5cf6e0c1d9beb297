"""``vla-gym-train td3`` from the command line."""

from __future__ import annotations

from vla_gym_trainers.commands import import_sb3
from vla_gym_trainers.td3.config import TD3RunConfig


def main(config: TD3RunConfig) -> str:
    """Train; return what is printed."""
    import_sb3()
    from vla_gym_trainers.evaluation.tables import print_results
    from vla_gym_trainers.td3.train import train_td3

    run = train_td3(config)
    if evaluation := run.card["results"].get("evaluation"):
        print_results(evaluation["start"], "The VLA")
        print_results(evaluation["policy"], "The policy")
    return f"run directory: {run.run_dir}"
