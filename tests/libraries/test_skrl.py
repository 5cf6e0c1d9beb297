"""Skrl: its example trains, and its memory is right with the adapter and wrong without it."""

import gymnasium as gym
import pytest
import torch
from episode_clock import FLAT, check_transitions

from vla_gym.errors import ConfigError

pytest.importorskip("skrl", reason="skrl is not installed")


def stored(memory):
    """Return what a memory holds, as arguments of ``check_transitions``."""
    names = ("observations", "next_observations", "rewards", "terminated")
    rows = memory.memory_index * memory.num_envs
    return [memory.get_tensor_by_name(name).flatten(0, 1)[:rows].cpu() for name in names]


def test_replay(tmp_path, monkeypatch):
    from examples.skrl_sac import train

    monkeypatch.chdir(tmp_path)  # it writes to runs/
    agent = train(60, **FLAT)
    check_transitions(*stored(agent.memory))
    assert all(torch.isfinite(p).all() for p in agent.policy.parameters())


def test_without_the_adapter_it_learns_from_other_episodes(tmp_path, monkeypatch):
    """Fails when skrl is mended, and the adapter is not needed any more."""
    import examples.skrl_sac as example

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(example, "use_final_obs", lambda agent: agent)
    with pytest.raises(AssertionError, match="of another episode"):
        check_transitions(*stored(example.train(40, **FLAT).memory))


def test_a_part_of_the_environments_is_refused():
    from types import SimpleNamespace

    from vla_gym.integrations.skrl import use_final_obs

    agent = use_final_obs(SimpleNamespace(record_transition=print))
    infos = {"final_obs": [None, 0], "_final_obs": [False, True]}
    with pytest.raises(ConfigError, match="all 2 environments, got 1"):
        agent.record_transition(next_observations=torch.zeros(1, 3), infos=infos)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"autoreset_mode": "NEXT_STEP", "flat": True}, "autoreset_mode='SAME_STEP'"),
        ({"autoreset_mode": "SAME_STEP"}, "flat=True"),
    ],
)
def test_wrong_environments(options, message):
    from vla_gym.integrations.skrl import wrap_env

    envs = gym.make_vec("LiberoVLA-goal-v0", 2, **FLAT, **options)
    with pytest.raises(ConfigError, match=message):
        wrap_env(envs)
    envs.close()
