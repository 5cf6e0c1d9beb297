"""Scripted experts on privileged state, one per task, for demonstrations and for tests.

>>> from vla_gym.experts import EXPERT_TASKS
>>> EXPERT_TASKS["goal"]
(0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
"""

from vla_gym.experts.phase_machine import Expert, Phase
from vla_gym.experts.registry import EXPERT_TASKS, make_expert

__all__ = ["EXPERT_TASKS", "Expert", "Phase", "make_expert"]
