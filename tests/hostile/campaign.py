"""The hostile campaign: ``make test-hostile``, or ``python tests/hostile/campaign.py --help``.

Bad arguments, files and command lines, drawn from a seed, each tried in a process of its own. Of
the 0 raw errors, 0 pieces of accepted nonsense and 0 late verdicts that are promised, anything else
ends it with status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    import conftest  # noqa: F401  (threads, cache and assets of the tests)

import cases_envs  # noqa: E402
import cases_files  # noqa: E402
import cases_vlas  # noqa: E402
import matplotlib.pyplot  # noqa: E402, F401  (as much as possible is imported once, here)
import torch  # noqa: E402
from engine import VERDICTS, Case, Outcome, run_cases, table  # noqa: E402
from vla_checkpoints import CHECKPOINTS, copied  # noqa: E402

from vla_gym.rl_token import choose_rl_token  # noqa: E402
from vla_gym.vector.preload import preload  # noqa: E402
from vla_gym.vla import load  # noqa: E402
from vla_gym_trainers.report import page  # noqa: E402, F401

#: Modules of cases, and their shares of the whole.
MODULES = {cases_envs: 0.4, cases_files: 0.4, cases_vlas: 0.2}


def all_cases(count: int, seed: int, only: str = "", every: int = 1) -> Iterator[Case]:
    """Yield about ``count`` cases, those whose group or name holds ``only``.

    Each file and preset has one at least; of each group only each ``every``-th one is yielded.
    """
    groups = Counter[str]()
    for module, share in MODULES.items():
        for case in module.cases(int(count * share), seed):
            if only in f"{case.group} {case.name}":
                groups[case.group] += 1
                if groups[case.group] % every == 1 % every:
                    yield case


def warm_up() -> None:
    """Load once what the processes of the cases would load each."""
    torch.set_num_threads(1)
    preload([("goal", 8)], "lite")
    choose_rl_token("auto", load("mini"))
    with TemporaryDirectory() as scratch:
        for name, folder in CHECKPOINTS.items():
            cases_vlas.loads(copied(folder, Path(scratch, name)), name)


def lines(rows: list[dict[str, object]]) -> list[str]:
    """Return the table as text."""
    width = max(len(str(row["group"])) for row in rows)
    head = ["tried", *VERDICTS, "slowest_s"]
    texts = [" ".join([" " * width, *(f"{name:>9}" for name in head)])]
    return texts + [
        " ".join([f"{row['group']!s:<{width}}", *(f"{row[name]!s:>9}" for name in head)])
        for row in rows
    ]


def main() -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="about so many (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="draws them (default 0)")
    parser.add_argument(
        "--every", type=int, default=1, help="of each group each such one (default 1)"
    )
    parser.add_argument("--only", default="", help="groups or names that hold this text")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="the table as JSON")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    warm_up()
    outcomes: list[Outcome] = []
    begun = time.monotonic()
    for outcome in run_cases(
        all_cases(options.cases, options.seed, options.only, options.every), options.processes
    ):
        outcomes.append(outcome)
        if outcome.verdict in ("nonsense", "raw", "late"):
            case = outcome.case
            print(
                f"--- {outcome.verdict}: {case.group}: {case.name}\n{outcome.message}", flush=True
            )
    rows = table(outcomes)
    print("\n".join(lines(rows)))
    result = {
        "seed": options.seed,
        "minutes": round((time.monotonic() - begun) / 60.0, 1),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(rows[-1][name] for name in ("nonsense", "raw", "late")))


if __name__ == "__main__":
    sys.exit(main())
