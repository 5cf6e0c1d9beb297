"""A token head from random weights: cloned, handed over, reinforced; how good it is all along.

Part of tools/make_results_page.py, which makes the table from the training card in
results/phases/NAME/train.json and from validations.json there: what student and teacher won of the
same sampled layouts.
"""

from __future__ import annotations

from typing import Any

from page_blocks import rate

from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.phases import phase_at

HEAD = ("run", "control steps", "phase", "epsilon", "student", "teacher", "of the teacher's")


def table(runs: list[tuple[str, dict[str, Any], list[dict[str, float]]]]) -> list[str]:
    """Return the table's lines.

    Args:
        runs: Name, training card and validations.json of each run.
    """
    if not runs:
        return ["None yet."]
    lines = [f"| {' | '.join(HEAD)} |", "| --- |" + " --- |" * (len(HEAD) - 1)]
    for name, train, validations in runs:
        config = train["config"]
        phases = {name: config[name] for name in ("warmup_steps", "transition_steps")}
        for validation in validations:
            episodes = int(validation["episodes"])
            phase = phase_at(PPOConfig(**phases), int(validation["steps"]))
            won = [round(validation[who] * episodes) for who in ("student", "teacher")]
            cells = [
                name,
                f"{int(validation['steps']):,}",
                phase.name,
                f"{phase.epsilon:.2f}",
                *(rate(k, episodes) for k in won),
                f"{100 * won[0] / won[1]:.0f} %" if won[1] else "-",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return lines
