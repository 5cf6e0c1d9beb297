"""Evaluation on official initial states: ``vla-gym eval`` and ``vla-gym eval-merge``.

config, command     options, and the commands from start to end
episodes            which episodes there are, and their rows in a card
trained, trained_on  policies of training runs, for vla_gym.rollout, which plays all episodes
run_player          plays the policies of a run: validation, guard, final evaluation, films
summary             counts, intervals, confusion, paired tests: a function of the episodes
cards               result cards: made, read, resumed, merged
tables, films, play  what a person looks at
"""

from __future__ import annotations
