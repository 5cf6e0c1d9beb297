"""``env.py`` of a hub repository for LeRobot's EnvHub; vla_gym must be installed too."""

from vla_gym.integrations.lerobot.envs import make_env

__all__ = ["make_env"]
