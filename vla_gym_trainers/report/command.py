"""``vla-gym report`` from start to end."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from vla_gym.envs.checks import as_integer
from vla_gym.errors import ConfigError
from vla_gym.files import replacing


@dataclass(frozen=True)
class ReportConfig:
    """Write one self-contained HTML page about training runs and evaluations.

    Takes run directories of vla-gym-train td3 | ppo | grpo (finished or not), their
    card.json alone, and result cards of vla-gym eval. Runs that differ in nothing but the seed are
    drawn as one, with a band. What a run has not logged is left out, and the page says so.

    Examples:
      vla-gym report runs/bowl
      vla-gym report runs/td3-seed0 runs/td3-seed10000 runs/grpo --out compare.html
      vla-gym report runs/vla/card.json runs/td3/official/card.json --out cards.html
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories and result cards."""
    out: Path = Path("report.html")
    """The page; one that is there already is replaced."""
    title: str = "vla_gym report"
    """Heading of the page."""
    films: int = 4
    """Film strips of each run or card at most (before and after count as one); 0: none."""

    def check(self) -> None:
        """Check the options.

        Raises:
            ConfigError: If one is out of range or a run is named twice.
        """
        as_integer(self.films, "--films", 0)
        if not self.runs:
            raise ConfigError("Name at least one run directory or result card.")
        seen: set[Path] = set()
        for path in self.runs:
            if path.resolve() in seen:
                raise ConfigError(f"{path} is named twice: name each run and card once.")
            seen.add(path.resolve())
        if self.out.is_dir():
            raise ConfigError(f"--out {self.out} is a directory: name an .html file in it.")
        if self.out.suffix.lower() not in (".html", ".htm"):
            raise ConfigError(f"--out must end in .html, got {self.out}.")


def main(config: ReportConfig) -> int:
    """Write the page and say where; return the exit status.

    Raises:
        ConfigError: If an option is wrong, a run or card cannot be read, or the page not written.
    """
    from vla_gym_trainers.report.page import make_page

    config.check()
    page = make_page(config.runs, title=config.title, films=config.films).encode()
    try:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(config.out) as draft:
            draft.write_bytes(page)
    except OSError as error:
        raise ConfigError(f"--out {config.out} cannot be written: {error}") from error
    sys.stdout.write(f"report: {config.out} ({len(page) / 1024:,.0f} KiB)\n")
    return 0
