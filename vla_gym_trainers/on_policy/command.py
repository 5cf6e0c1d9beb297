"""``vla-gym-train ppo | grpo`` from the command line."""

from __future__ import annotations

from vla_gym_trainers.on_policy.config import OnPolicyConfig
from vla_gym_trainers.on_policy.train import train


def main(config: OnPolicyConfig) -> str:
    """Train; return what is printed: nothing in further processes of a data-parallel run."""
    run = train(config)
    if not run.card:
        return ""
    training = run.card["results"]["training"]
    lines = [
        f"{training['env_steps']:,} control steps, {training['rollouts']} rollouts, "
        f"{training['minutes']:.1f} minutes"
    ]
    validation = run.card["results"].get("validation")
    if validation and validation["history"]:
        first, best = validation["history"][0][1], validation["best"]
        lines.append(f"sampled layouts, greedy: {first:.3f} at the start, best {best:.3f}")
    return "\n".join([*lines, f"run directory: {run.run_dir}"])
