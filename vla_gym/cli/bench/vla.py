"""``vla-gym bench --vla``: chunks a second of a frozen VLA."""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vla_gym.cli.options import check_report
from vla_gym.errors import ConfigError
from vla_gym.outside import Count, PositiveInt, check_fields
from vla_gym.suites import suite_tasks

if TYPE_CHECKING:
    from vla_gym.vla.base import FrozenVLA


@dataclass(frozen=True)
class VLABenchConfig:
    """Measure how many chunks a second a frozen VLA computes, for several batch sizes.

    Everything that a step of the environment would wait for is timed: preprocessing, upload, the
    network, the actions back on the CPU. Images are random; instructions are those of a suite.
    """

    vla: str
    """As in vla=...: mini, <backend>:/path?option=value, or a folder. openvla and openvla-oft
    without a path: random weights of the published size."""
    device: str = "cpu"
    """Torch device, e.g. cuda."""
    dtype: str | None = None
    """Of the weights; default: what suits the backend and the device."""
    compile: bool = False
    """Compile the network with torch.compile."""
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    """Observations in a forward pass."""
    suite: str = "goal"
    """Row i has the instruction of task i modulo their number."""
    repeats: PositiveInt = 10
    """Timed passes for each batch size."""
    warmup: Count = 3
    """Passes before them: compilation, memory, caches."""
    json: Path | None = None
    """Also write the figures here."""

    def __post_init__(self) -> None:
        """Check the values."""
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ConfigError(f"batch_sizes must be positive, got {self.batch_sizes}.")
        check_fields(self)
        check_report(self.json)


def observations(vla: FrozenVLA, batch: int, texts: list[str]) -> tuple[Any, ...]:
    """Return arguments of ``infer``: random images, instructions in turn, zero proprioception."""
    rng = np.random.default_rng(0)
    shape = (batch, vla.image_size, vla.image_size, 3)
    images = {name: rng.integers(0, 256, shape, dtype=np.uint8) for name in vla.cameras}
    proprio = np.zeros((batch, vla.proprio_size), np.float32)
    return images, [texts[i % len(texts)] for i in range(batch)], proprio


def measure_batch(
    vla: FrozenVLA, batch: int, texts: list[str], config: VLABenchConfig
) -> dict[str, Any]:
    """Time the passes of one batch size.

    Returns:
        ``batch``; ``ms``: median time of a pass; ``spread_ms``: half of the range of the times;
        ``chunks_per_s``; ``peak_mb``: memory that PyTorch held at most, in 10^6 bytes, None on a
        CPU.
    """
    import torch

    arguments = observations(vla, batch, texts)
    on_gpu = torch.device(config.device).type == "cuda"
    for _ in range(config.warmup):
        vla.infer(*arguments).actions.cpu()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(config.device)
    times = []
    for _ in range(config.repeats):
        begin = time.perf_counter()
        vla.infer(*arguments).actions.cpu()
        times.append(time.perf_counter() - begin)
    median = statistics.median(times)
    return {
        "batch": batch,
        "ms": 1e3 * median,
        "spread_ms": 1e3 * (max(times) - min(times)) / 2,
        "chunks_per_s": batch / median,
        "peak_mb": torch.cuda.max_memory_allocated(config.device) / 1e6 if on_gpu else None,
    }


def measure_vla(config: VLABenchConfig, vla: FrozenVLA) -> dict[str, Any]:
    """Measure every batch size of a loaded VLA and return a report for JSON."""
    import torch
    from tqdm import tqdm

    texts = [task.instruction for task in suite_tasks(config.suite)]
    sizes = tqdm(config.batch_sizes, desc=vla.name, unit="batch size", leave=False)
    rows = [measure_batch(vla, batch, texts, config) for batch in sizes]
    on_gpu = torch.device(config.device).type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "vla": vla.name,
        "horizon": vla.horizon,
        "device": torch.cuda.get_device_name(config.device) if on_gpu else "cpu",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "config": {name: str(value) for name, value in asdict(config).items()},
        "batches": rows,
    }


def load_vla(config: VLABenchConfig) -> FrozenVLA:
    """Load what ``--vla`` names.

    Raises:
        ConfigError: If backend or option is unknown, or an option is not name=value.
        WeightsError: If the checkpoint does not fit.
        NotEnoughMemoryError: If the device has too little memory.
    """
    from vla_gym.vla import load, parse_dtype
    from vla_gym.vla.spec_options import split_options

    name, options = split_options(config.vla)
    if name in ("openvla", "openvla-oft"):
        from vla_gym.vla.openvla.random_weights import random_policy

        how = {"dtype": config.dtype, "compile": config.compile, **options}
        how["dtype"] = parse_dtype(how["dtype"])
        return random_policy(name, device=config.device, **how)
    return load(config.vla, config.device, config.dtype, config.compile)


def main(config: VLABenchConfig) -> int:
    """Load, measure, print, write; returns the exit status."""
    from rich.console import Console
    from rich.table import Table

    report = measure_vla(config, load_vla(config))
    table = Table(title=f"{report['vla']} on {report['device']}, {report['date']}")
    for heading in ("batch", "ms a pass", "chunks/s", "actions/s", "GPU MB"):
        table.add_column(heading, justify="right")
    for row in report["batches"]:
        table.add_row(
            str(row["batch"]),
            f"{row['ms']:.1f} ± {row['spread_ms']:.1f}",
            f"{row['chunks_per_s']:.2f}",
            f"{row['chunks_per_s'] * report['horizon']:.1f}",
            "-" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if config.json is not None:
        config.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0
