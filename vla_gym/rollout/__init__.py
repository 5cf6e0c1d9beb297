"""Plays episodes: :func:`rollout` is the one loop that all evaluations, films and data use."""

from vla_gym.rollout.episodes import Episode, Start
from vla_gym.rollout.player import make_envs, play, rollout
from vla_gym.rollout.policies import ExpertPolicy, Info, Policy, RandomPolicy

__all__ = [
    "Episode",
    "ExpertPolicy",
    "Info",
    "Policy",
    "RandomPolicy",
    "Start",
    "make_envs",
    "play",
    "rollout",
]
