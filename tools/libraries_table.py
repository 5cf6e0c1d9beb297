"""Prints the table of docs/libraries.md: which RL library installs, trains, ends right, how fast.

    python tools/libraries_table.py

Uses the environments that ``make test-libraries`` makes. Each library is a process of its own: it
steps the bare environment with random actions, trains by its example for a few and for more chunks
(their difference is timed, so that starting up is not), and steps the bare environment again. Then
its tests run, which look at what it has stored.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Package, example, tests, environment, autoreset mode.
LIBRARIES = (
    ("stable-baselines3", "sb3_sac", "test_sb3_family.py", "most", "SAME_STEP"),
    ("sb3-contrib", "sb3_contrib_tqc", "test_sb3_family.py", "most", "SAME_STEP"),
    ("sbx-rl", "sbx_sac", "test_sb3_family.py", "most", "SAME_STEP"),
    ("torchrl", "torchrl_sac", "test_torchrl.py", "most", "DISABLED"),
    ("skrl", "skrl_sac", "test_skrl.py", "most", "SAME_STEP"),
    ("tianshou", "tianshou_sac", "test_tianshou.py", "most", "DISABLED"),
    ("ray", "rllib_ppo", "test_rllib.py", "rllib", "NEXT_STEP"),
)
FEW, TIMEOUT_S = 40, 1200


def bare(chunks: int, options: dict[str, Any]) -> float:
    """Return chunks per second of stepping alone, with random actions."""
    import gymnasium as gym

    import vla_gym  # noqa: F401  (registers the environments)

    envs = gym.make_vec("LiberoVLA-goal-v0", 2, flat=True, autoreset_mode="SAME_STEP", **options)
    envs.reset(seed=0)
    for _ in range(FEW // 2):
        envs.step(envs.action_space.sample())
    start = time.perf_counter()
    for _ in range(chunks // 2):
        envs.step(envs.action_space.sample())
    seconds = time.perf_counter() - start
    envs.close()
    return chunks / seconds


def measure(package: str, example: str, chunks: int) -> dict[str, Any]:
    """Return version, speed of the example and of bare stepping before and after it."""
    sys.path.insert(0, str(ROOT))
    options = {"vla": "mini-few", "assets": "lite", "task_ids": 8, "max_control_steps": 80}
    train = importlib.import_module(f"examples.{example}").train
    before = bare(chunks, options)
    seconds = []
    for count in (FEW, FEW, FEW + chunks):  # the first one compiles
        start = time.perf_counter()
        train(count, **options)
        seconds.append(time.perf_counter() - start)
    after = bare(chunks, options)
    return {
        "version": version(package),
        "trained": chunks / max(seconds[2] - seconds[1], 1e-9),
        "bare": (before + after) / 2,
    }


def row(package: str, example: str, tests: str, name: str, mode: str, chunks: int) -> list[str]:
    """Return a row of the table, from processes in the library's environment."""
    python = ROOT / ".venv-libraries" / name / "bin" / "python"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "VLA_GYM_ASSETS": "lite"}

    def run(*command: str, cwd: str | Path = ROOT) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(python), *command], cwd=cwd, env=env, capture_output=True, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip

    if not python.exists() or run("-m", "pip", "show", "-q", package).returncode:
        return [package, "no", "-", mode, "-", "-", "-"]
    with tempfile.TemporaryDirectory() as folder:  # skrl writes where it is
        script = [str(Path(__file__).resolve()), "--measure", package, example]
        done = run(*script, "--chunks", str(chunks), cwd=folder)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return [package, "yes", "no", mode, "-", "-", "-"]
    found = json.loads(done.stdout.splitlines()[-1])
    # SB3's family shares a file of tests, which name their example.
    chosen = example if example.startswith(("sb3", "sbx")) else "test"
    passed = run("-m", "pytest", "-q", f"tests/libraries/{tests}", "-k", chosen)
    return [
        f"{package} {found['version']}",
        "yes",
        "yes",
        mode,
        "yes" if passed.returncode == 0 else "no",
        f"{found['trained']:.1f}",
        f"{found['bare']:.1f}",
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=200, help="chunks that are timed")
    parser.add_argument("--only", nargs="*", help="packages; default: all")
    parser.add_argument("--measure", nargs=2, metavar=("PACKAGE", "EXAMPLE"), help="one, as JSON")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure, args.chunks)))
        return
    print("| library | installs | trains | autoreset | ends right | chunks/s | bare chunks/s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for library in LIBRARIES:
        if not args.only or library[0] in args.only:
            print(f"| {' | '.join(row(*library, args.chunks))} |", flush=True)


if __name__ == "__main__":
    main()
