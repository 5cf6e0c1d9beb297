"""The trainers' extra, which some policies need and others do not."""

from __future__ import annotations

from vla_gym.errors import ConfigError


def import_sb3() -> None:
    """Import stable-baselines3.

    Raises:
        ConfigError: If the trainers' extra is not installed.
    """
    try:
        import stable_baselines3  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"This command needs the trainers ({error}): pip install 'vla-gym[trainers]'"
        ) from error
