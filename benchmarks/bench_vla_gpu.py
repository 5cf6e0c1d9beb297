"""OpenVLA-OFT and OpenVLA of the published size on a GPU, and how fast its machine renders.

Random weights, so nothing is downloaded: speed does not depend on them. Every variant is loaded,
measured and freed in turn; what fails (memory, compiler) is noted and the next one runs. Then
observations a second (two 256x256 images, LIBERO's visuals, one control step) for some numbers of
worker processes.

    python benchmarks/bench_vla_gpu.py --out report                     # report.json and report.md
    python benchmarks/bench_vla_gpu.py --batches 1 32 --variants eager graphs --no-render
    python benchmarks/bench_vla_gpu.py --peak-tflops 989 --bandwidth-tb 4.8   # H200's data sheet
"""

# ruff: noqa: E402 - the path must be set before the imports

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from vla_gym.cli.bench.vla import VLABenchConfig, load_vla, measure_vla

_GRAPHS = ("pad_prompt_to=40", "compile_mode=reduce-overhead")
#: Name -> what differs from the defaults of the bench.
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "eager, no padding": {"options": ("group_prompts=true",), "one_task": True},
    "compiled": {"compile": True, "options": ("pad_prompt_to=40",)},
    "graphs": {"compile": True, "options": _GRAPHS},
    "tokens": {"options": ("num_views=1", "head=token")},
    "tokens, graphs": {"compile": True, "options": ("num_views=1", "head=token", *_GRAPHS)},
    "autoregressive": {"vla": "openvla"},
}
COLUMNS = ("ms", "chunks_per_s", "tflops_per_s", "roofline", "share", "peak_mb")


def measure_variants(options: argparse.Namespace) -> dict[str, Any]:
    """Return the reports, or what went wrong, by variant."""
    found: dict[str, Any] = {}
    for name in options.variants:
        config = VLABenchConfig(
            **{"vla": "openvla-oft"} | VARIANTS[name],
            device=options.device,
            batch_sizes=tuple(options.batches),
            repeats=options.repeats,
            peak_tflops=options.peak_tflops,
            bandwidth_tb=options.bandwidth_tb,
        )
        begin = time.monotonic()
        vla = None
        try:
            vla = load_vla(config)
            found[name] = measure_vla(config, vla, lambda row, name=name: print(name, row))
        except Exception as error:  # the other variants are worth having
            found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
            print(name, found[name]["error"])
        found[name]["seconds"] = round(time.monotonic() - begin, 1)
        del vla
        torch.compiler.reset()
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
        write(options, found, {})
    return found


def measure_rendering(workers: list[int], seconds: float, assets: str) -> dict[str, Any]:
    """Return observations a second by number of workers."""
    from vla_gym.vector import LiberoVectorEnv

    rates: dict[str, Any] = {}
    for count in workers:
        try:
            envs = LiberoVectorEnv(
                count, "goal", workers=count, chunk_len=1, image_size=256, assets=assets,
                visual_profile="libero",
            )  # fmt: skip
            try:
                envs.reset(seed=0)
                actions = np.zeros((count, 1, 7), np.float32)
                for _ in range(3):
                    envs.step(actions)
                steps, begin = 0, time.monotonic()
                while time.monotonic() - begin < seconds:
                    envs.step(actions)
                    steps += 1
                rates[str(count)] = count * steps / (time.monotonic() - begin)
            finally:
                envs.close()
        except Exception as error:
            rates[str(count)] = f"{type(error).__name__}: {error}"[:300]
        print("rendering", count, "workers:", rates[str(count)])
    return rates


def write(options: argparse.Namespace, variants: dict[str, Any], rates: dict[str, Any]) -> None:
    """Write both files; called after every variant, as a long run may be cut short."""
    path = Path(options.out)
    report = {"variants": variants, "observations_per_s": rates, "cores": os.cpu_count()}
    path.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    lines = ["| variant | batch | ms | chunks/s | TFLOP/s | roofline | share | GPU MB |"]
    lines.append("| --- " * 8 + "|")
    for name, part in variants.items():
        if "error" in part:
            lines.append(f"| {name} | {part['error'].splitlines()[0]} |" + " |" * 6)
        for row in part.get("batches", ()):
            cells = ("-" if row[key] is None else f"{row[key]:.4g}" for key in COLUMNS)
            lines.append(f"| {name} | {row['batch']} | {' | '.join(cells)} |")
    if rates:
        lines += ["", "| workers | observations/s |", "| --- | --- |"]
        lines += [f"| {count} | {rate} |" for count, rate in rates.items()]
    devices = sorted({part["device"] for part in variants.values() if "device" in part})
    dates = sorted({part["date"] for part in variants.values() if "date" in part})
    lines += ["", f"{', '.join(devices)}; {os.cpu_count()} cores; {', '.join(dates[:1])}."]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="vla_gpu", help="files OUT.json and OUT.md")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--peak-tflops", type=float)
    parser.add_argument("--bandwidth-tb", type=float)
    parser.add_argument("--no-render", action="store_true")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--render-seconds", type=float, default=10.0)
    parser.add_argument("--assets", default="libero")
    options = parser.parse_args()
    variants = measure_variants(options)
    if not options.no_render:
        rates = measure_rendering(options.workers, options.render_seconds, options.assets)
        write(options, variants, rates)


if __name__ == "__main__":
    main()
