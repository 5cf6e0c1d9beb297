"""``vla-gym bench``: this package's vector environment beside the others, in one run."""

from vla_gym.cli.bench.config import BenchConfig

__all__ = ["BenchConfig"]
