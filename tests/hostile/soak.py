"""The soak: ``make soak MINUTES=30``, or ``python tests/hostile/soak.py --help``.

Public commands run for minutes while their workers are killed, stopped and terminated at random
and memory is taken and freed beside them:

- ``vla-gym eval``: every episode is counted once and is what it is in a run that nobody disturbs;
- ``vla-gym-train td3`` collecting freely (``--ahead 2``) and ``ppo`` one rollout ahead: they end
  properly, with a log and a card that agree;
- the same two, one block ahead, killed themselves at random moments and resumed: weights and log
  are those of a run that nobody killed, bit for bit.

After each, no process, no shared memory and no file may be left, and resident memory may not have
grown. Exit status 0 if all of that holds.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "helpers")]
    import conftest  # noqa: F401  (threads, cache and assets of the tests)

import psutil  # noqa: E402
from run_logs import rows_without_times  # noqa: E402
from vector_processes import MARKER, marked, new_marker, orphan_blocks  # noqa: E402

from vla_gym_trainers.report.data import read_rows  # noqa: E402
from vla_gym_trainers.runs.run_dir import RunDir  # noqa: E402

#: Mean seconds between two signals to workers, and the weights of their kinds. On a slow machine an
#: episode takes longer; after six deaths of a worker without the end of one a command gives up.
EVERY_S = 10.0
SIGNALS = {"SIGKILL": 2, "SIGTERM": 1, "SIGSTOP, SIGCONT": 4}
#: Of a command after its time, on a machine that others use as well.
PATIENCE_S = 600.0
MAX_GROWTH = 0.02
#: Measurements of memory, four a second, below which growth is still that of the start.
MIN_SAMPLES = 400
HOG = """
import os, sys, time
parent = os.getppid()
while os.getppid() == parent:  # the soak may be killed
    block = bytearray(int(sys.argv[1]))
    block[::4096] = b"x" * len(range(0, len(block), 4096))
    time.sleep(2)
    del block
    time.sleep(1)
"""
TD3 = (
    *("td3", "--task-ids", "8", "--vla", "mini-few", "--num-envs", "4", "--workers", "2"),
    *("--groups", "2", "--learning-starts", "16", "--critic-warmup-steps", "10"),
    *("--batch-size", "32", "--net-arch", "32", "--buffer-size", "1000", "--eval-states", "0"),
    *("--train-freq", "8", "--utd-ratio", "0.5", "--no-progress"),
)
PPO = (
    *("ppo", "--preset", "ppo_rl_token", "--task-ids", "8", "--num-envs", "4", "--workers", "2"),
    *("--groups", "2", "--rollout-chunks", "8", "--value-warmup-steps", "100"),
    *("--eval-states", "0", "--checkpoint-every", "400", "--no-progress"),
)


class Command:
    """A command in a process group of its own, with files and processes that can be told."""

    def __init__(self, folder: Path, program: str, *arguments: str) -> None:
        """Start it."""
        self.marker, self.tmp = new_marker(), folder / f"tmp-{time.monotonic_ns()}"
        self.tmp.mkdir(parents=True)
        self.blocks = set(os.listdir("/dev/shm"))
        self.log = self.tmp.with_suffix(".log")
        module = {"vla-gym": "vla_gym.cli.main", "vla-gym-train": "vla_gym_trainers.cli"}[program]
        environment = {**os.environ, MARKER: self.marker, "TMPDIR": str(self.tmp)}
        with self.log.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=folder,
                start_new_session=True,
            )
        self.rss: list[int] = []

    def workers(self) -> list[psutil.Process]:
        """Return its worker processes: what its process server has forked."""
        try:
            servers = self.process.children()  # a fork has its parent's command line
            pairs = [(server, one) for server in servers for one in server.children()]
            return [one for server, one in pairs if one.cmdline() == server.cmdline()]
        except psutil.Error:
            return []

    def look(self) -> None:
        """Measure its memory."""
        try:
            self.rss.append(self.process.memory_info().rss)
        except psutil.Error:
            pass

    def kill(self) -> None:
        """Kill it, not its workers: they must end by themselves."""
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def finish(self) -> str:
        """Wait for its end; return what is wrong, empty if nothing is."""
        try:
            status = self.process.wait(PATIENCE_S)
        except psutil.TimeoutExpired:
            for pid in marked(self.marker):
                os.kill(pid, signal.SIGKILL)
            return f"no end within {PATIENCE_S:g} s"
        if status:
            return f"status {status}: {self.log.read_text(errors='replace')[-6000:]}"
        return self.left()

    def left(self) -> str:
        """Return what it has left behind, after a moment for its processes to end."""
        deadline = time.monotonic() + 60.0
        while (alive := marked(self.marker)) and time.monotonic() < deadline:
            time.sleep(0.2)
        found = [f"processes {sorted(alive)}"] if alive else []
        if blocks := orphan_blocks(self.blocks):
            found.append(f"shared memory {sorted(blocks)}")
        if self.process.returncode == 0 and (
            files := [p.name for p in self.tmp.iterdir() if not p.name.startswith("torchinductor")]
        ):  # torch's own cache
            found.append(f"files {files}")
        return ", ".join(found)

    def growth(self) -> float | None:
        """Return by which share its memory has grown in the second half; None: too short."""
        if len(self.rss) < MIN_SAMPLES:
            return None
        tenth = len(self.rss) // 10
        early = sorted(self.rss[len(self.rss) // 2 :][:tenth])
        late = sorted(self.rss[-tenth - 1 : -1])
        return late[len(late) // 2] / early[len(early) // 2] - 1.0


def disturb(command: Command, rng: random.Random, seconds: float) -> Counter[str]:
    """Send random signals to random workers until the command ends."""
    sent: Counter[str] = Counter()
    resume: dict[int, float] = {}
    following, stop = time.monotonic() + 20.0, time.monotonic() + seconds + PATIENCE_S
    while command.process.poll() is None and time.monotonic() < stop:
        time.sleep(0.25)
        command.look()
        now = time.monotonic()
        for pid in [pid for pid, when in resume.items() if when < now]:
            del resume[pid]
            _send(pid, signal.SIGCONT)
        workers = [w for w in command.workers() if w.pid not in resume]
        if now > following and workers:
            name = rng.choices(list(SIGNALS), list(SIGNALS.values()))[0]
            pid = rng.choice(workers).pid
            if _send(pid, signal.Signals[name.split(",")[0]]):
                sent[name] += 1
            if name.startswith("SIGSTOP"):
                resume[pid] = now + rng.uniform(0.1, 4.0)
            following = now + rng.expovariate(1.0 / EVERY_S)
    for pid in resume:
        _send(pid, signal.SIGCONT)
    return sent


def _send(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def evaluations(folder: Path, seconds: float, rng: random.Random, quick: bool) -> dict[str, Any]:
    """Evaluate again and again under signals; every card must say what the undisturbed one says."""
    few = "1" if quick else "4"
    arguments = ["eval", "--vla", "mini-few", "--suite", "goal", "--episodes", few]
    arguments += ["--num-envs", "6", "--workers", "3", "--no-progress"]
    row = _row("vla-gym eval") | {"episodes": 0, "replays": 0}
    calm = Command(folder, "vla-gym", *arguments, "--out", str(folder / "calm"))
    if problem := calm.finish():
        return row | {"problems": [f"undisturbed: {problem}"]}
    expected = played(json.loads((folder / "calm" / "card.json").read_text()))
    until, number = time.monotonic() + seconds, 0
    while number == 0 or time.monotonic() < until:
        out = folder / f"eval{number}"
        number += 1
        command = Command(folder, "vla-gym", *arguments, "--out", str(out))
        _add(row, command, disturb(command, rng, seconds))
        if row["problems"]:
            break
        card = json.loads((out / "card.json").read_text())
        row["episodes"] += len(card["results"]["episodes"])
        row["replays"] += card["environment"]["worker_restarts"]
        if played(card) != expected:
            row["problems"].append(f"{out}: other episodes than undisturbed")
    return row


def played(card: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a card's episodes without how often each was begun again."""
    episodes: list[dict[str, Any]] = card["results"]["episodes"]
    return [{k: v for k, v in episode.items() if k != "replays"} for episode in episodes]


def training(name: str, folder: Path, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Train under signals to the workers."""
    run = folder / name
    length = ["--run-dir", str(run), "--max-minutes", f"{seconds / 60:.3f}", "--ahead"]
    settings = {
        "td3": [*TD3, *length, "2", "--total-timesteps", "1000000", "--checkpoint-every", "500"],
        "ppo": [*PPO, *length, "1", "--total-steps", "10000000"],
    }[name]
    row = _row(f"{name}, ahead {2 if name == 'td3' else 1}")
    command = Command(folder, "vla-gym-train", *settings)
    _add(row, command, disturb(command, rng, seconds))
    if row["problems"]:
        return row
    results = json.loads((run / "card.json").read_text())["results"]["training"]
    rows = read_rows(run / "metrics.jsonl")
    steps = [line["step"] for line in rows]
    total = results.get("chunks") or results.get("env_steps")
    if steps != sorted(steps) or (steps and steps[-1] > total) or not total:
        row["problems"].append(f"log and card disagree: {steps[-3:]}, {total}")
    return row


def _add(row: dict[str, Any], command: Command, sent: Counter[str]) -> None:
    row["signals"] += sum(sent.values())
    if problem := command.finish():
        row["problems"].append(problem)
    growth = command.growth()
    if growth is not None:
        row["growth"] = max(row["growth"] or growth, growth)
        if growth > MAX_GROWTH:
            row["problems"].append(f"memory has grown by {100 * growth:.1f} %")


def _row(part: str) -> dict[str, Any]:
    return {"part": part, "signals": 0, "growth": None} | {"problems": []}


def kills(name: str, folder: Path, seconds: float, rng: random.Random) -> dict[str, Any]:
    """Kill a trainer at random moments and resume it, until the time is over; compare the ends."""
    settings = {
        "td3": [*TD3, "--total-timesteps", "320", "--ahead", "1", "--checkpoint-every", "80"],
        "ppo": [*PPO, "--total-steps", "2000", "--ahead", "1"],
    }[name]
    row: dict[str, Any] = {"part": f"{name}, SIGKILL", "kills": 0, "runs": 0, "problems": []}
    calm = folder / f"{name}-calm"
    begun = time.monotonic()
    problem = Command(folder, "vla-gym-train", *settings, "--run-dir", str(calm)).finish()
    length = time.monotonic() - begun
    if problem:
        return row | {"problems": [f"undisturbed: {problem}"]}
    expected, until = outcome(calm), time.monotonic() + seconds
    while row["runs"] == 0 or time.monotonic() < until:
        run = folder / f"{name}-killed-{row['runs']}"
        arguments, ended = [*settings, "--run-dir", str(run), "--auto-resume"], False
        for _ in range(3):
            command = Command(folder, "vla-gym-train", *arguments)
            try:
                command.process.wait(rng.uniform(0.3, 0.9) * length)
                ended = True
                break
            except psutil.TimeoutExpired:
                command.kill()
                row["kills"] += 1
                if problem := command.left():
                    row["problems"].append(f"killed: {problem}")
        if not ended:
            command = Command(folder, "vla-gym-train", *arguments)
        if problem := command.finish():
            row["problems"].append(problem)
        elif outcome(run) != expected:
            row["problems"].append(f"{run} differs from the run that nobody killed")
        row["runs"] += 1
        if row["problems"]:
            break
        shutil.rmtree(run)
    return row


def outcome(run: Path) -> dict[str, Any]:
    """Return all that a run has made but times: weights, log, replay."""
    rows = [
        {key: value for key, value in line.items() if "time/" not in key}
        for line in rows_without_times(run / "metrics.jsonl")
    ]
    newest = RunDir(run).checkpoints()[-1]
    weights = {path.name: path.read_bytes() for path in sorted(run.glob("*.safetensors"))}
    found = {"newest": newest.name, "weights": weights, "rows": rows}
    if (path := newest / "replay.pkl").is_file():  # of a run of our own
        ring = pickle.loads(path.read_bytes())._ring
        found["replay"] = ring._matrix[: ring.num_added].tobytes()
    return found


def main() -> int:
    """Run all parts; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="for all parts (default 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the signals (default 0)")
    parser.add_argument("--only", default="", help="parts, such as eval,kill-td3; default: all")
    parser.add_argument("--quick", action="store_true", help="short commands, for the tests")
    parser.add_argument("--out", type=Path, help="the figures as JSON")
    options = parser.parse_args()
    rng, share = random.Random(options.seed), options.minutes * 60.0 / 5
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "eval": lambda folder: evaluations(folder, share, rng, options.quick),
        "td3": lambda folder: training("td3", folder, share, rng),
        "ppo": lambda folder: training("ppo", folder, share, rng),
        "kill-td3": lambda folder: kills("td3", folder, share, rng),
        "kill-ppo": lambda folder: kills("ppo", folder, share, rng),
    }
    size = min(2 * 2**30, psutil.virtual_memory().available // 4)
    begun, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        hog = subprocess.Popen([sys.executable, "-c", HOG, str(size)])
        try:
            for name, part in parts.items():
                if not options.only or name in options.only.split(","):
                    rows.append(part(Path(folder) / name))
                    print(json.dumps(rows[-1]), flush=True)
                    result = {
                        "seed": options.seed,
                        "minutes": round((time.monotonic() - begun) / 60.0, 1),
                        "cores": os.cpu_count(),
                        "load": round(os.getloadavg()[2], 1),
                        "pressure_gb": round(size / 1e9, 1),
                        "rows": rows,
                    }
                    if options.out:
                        options.out.write_text(json.dumps(result, indent=1) + "\n")
        finally:
            hog.kill()
            hog.wait()
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
