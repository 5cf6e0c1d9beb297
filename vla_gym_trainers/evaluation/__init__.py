"""Evaluation on official initial states: ``vla-gym eval`` and ``vla-gym eval-merge``.

config, command     options, and the commands from start to end
episodes            which episodes there are, and what became of them
policies            who acts: one small interface, one class a kind
worker_env          an environment in its worker: control steps, experts, achieved goals
player              plays episodes over the vector environment
summary             counts, intervals, confusion, paired tests: a function of the episodes
cards               result cards: made, read, resumed, merged
tables, films       what a person looks at
"""

from __future__ import annotations
