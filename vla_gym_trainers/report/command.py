"""``vla-gym report`` from start to end."""

from __future__ import annotations

import sys

from vla_gym.errors import ConfigError
from vla_gym_trainers.report.config import ReportConfig
from vla_gym_trainers.report.page import make_page


def main(config: ReportConfig) -> int:
    """Write the page and say where; return the exit status.

    Raises:
        ConfigError: If an option is wrong, a run or card cannot be read, or the page not written.
    """
    config.check()
    page = make_page(config).encode()
    try:
        config.out.parent.mkdir(parents=True, exist_ok=True)
        draft = config.out.with_name(f".{config.out.name}.tmp")
        draft.write_bytes(page)
        draft.replace(config.out)
    except OSError as error:
        raise ConfigError(f"--out {config.out} cannot be written: {error}") from error
    sys.stdout.write(f"report: {config.out} ({len(page) / 1024:,.0f} KiB)\n")
    return 0
