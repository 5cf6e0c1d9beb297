"""Evaluation on official initial states: ``vla-gym eval``, ``eval-merge`` and ``play``.

policy_config       options that say who acts, and what they load
config, command     options of eval and eval-merge, and the commands from start to end
trained             policies of training runs, for vla_gym.rollout, which plays all episodes
run_player          plays the policies of a run: validation, guard, final evaluation, films
summary             counts, intervals, confusion, paired tests: a function of the episodes
cards               result cards: read, resumed, merged
tables, films, play  what a person looks at
"""
