"""Plays a vector env with ``send`` and ``recv`` and checks each row against its reference."""

import numpy as np
from vector_reference import DISABLED


def play_groups(envs, expected, seed, turns):
    """Two groups by turns; ``recv`` names the environments."""
    expected.check_reset(envs.reset(seed=seed))
    groups = [group.tolist() for group in envs.groups(2)]
    for group in groups:
        envs.send(expected.actions(group), group)
    for turn in range(turns):
        group = groups[turn % 2]
        result = envs.recv(env_ids=group, timeout=60)
        expected.check_step(result, ids=sorted(group))
        _reset_ended(envs, expected, group)
        envs.send(expected.actions(group), group)
    envs.recv(timeout=60)  # nothing is under way for whoever plays next


def play_whoever_is_done(envs, expected, seed, turns):
    """All are sent; those that are done first go on."""
    expected.check_reset(envs.reset(seed=seed))
    envs.send(expected.actions(), np.arange(expected.num_envs))
    played = set()
    for _ in range(turns):
        result = envs.recv(min_envs=3, timeout=60)
        ids = result[4]["env_id"].tolist()
        assert len(ids) == 3
        played.update(ids)
        expected.check_step(result, ids=ids)
        _reset_ended(envs, expected, ids)
        envs.send(expected.actions(ids), ids)
    assert len(played) == expected.num_envs
    envs.recv(timeout=60)


def _reset_ended(envs, expected, ids):
    due = [i for i in ids if expected.due[i]] if expected.mode == DISABLED else []
    if due:
        envs.reset_send(due)
        result = envs.recv(env_ids=due, timeout=60)
        expected.check_step(result, ids=sorted(due), reset=due)
