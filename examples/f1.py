"""F1's three phases on one page: a world model, an explorer that it pays, the two in turn.

    python examples/f1.py --preset f1_tiny --out runs/f1-example

Minutes with f1_tiny, hours with f1. Each phase is a run directory; started again, it goes on.
"""

import argparse
import dataclasses
from pathlib import Path

from vla_gym_trainers.explorer.config import AdversarialConfig, ExplorerConfig
from vla_gym_trainers.explorer.train import format_behaviours, train_explorer
from vla_gym_trainers.runs.settings import load_preset
from vla_gym_trainers.world_model.config import WorldModelConfig
from vla_gym_trainers.world_model.train import format_results, train_world_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--preset", default="f1_tiny", choices=("f1_tiny", "f1"))
parser.add_argument("--out", type=Path, default=Path("runs/f1-example"))
args = parser.parse_args()


def settings(kind, name, **changes):
    """Return a preset's settings for a run that begins, or goes on, below --out."""
    preset = load_preset(kind, f"{args.preset}{name}")
    folder = args.out / kind.algorithm
    return dataclasses.replace(preset, run_dir=folder, auto_resume=True, **changes)


teacher = settings(WorldModelConfig, "")
print(format_results(train_world_model(teacher)["results"]))

explorer = settings(ExplorerConfig, "_explorer", teacher=str(teacher.run_dir))
found = train_explorer(explorer).card["results"]["behaviours"]
print("\n".join(format_behaviours(found)))

# The explorer is paid for the world model's errors, which the world model unlearns.
adversarial = settings(AdversarialConfig, "_adversarial", explorer=explorer.run_dir)
results = train_explorer(adversarial).card["results"]
print("\n".join(format_behaviours(results["behaviours"], results["behaviours_before"])))
