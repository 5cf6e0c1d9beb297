"""RLlib: its example trains, its episodes and the targets of its value function are right."""

import numpy as np
import pytest
from episode_clock import FLAT, check_transitions

pytest.importorskip("ray.rllib", reason="ray[rllib] is not installed")


def test_episodes_and_targets(monkeypatch):
    from ray.rllib.connectors.learner import GeneralAdvantageEstimation
    from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

    from examples.rllib_ppo import train

    rows, batches = [], []
    sample, estimate = SingleAgentEnvRunner.sample, GeneralAdvantageEstimation.__call__

    def recorded(self, *args, **kwargs):
        found = sample(self, *args, **kwargs)
        for episode in found:  # at once: the learner adds a time step to each
            obs, rewards = np.array(episode.get_observations()), np.array(episode.get_rewards())
            ends = np.zeros((len(rewards), 2), bool)
            ends[-1] = episode.is_terminated, episode.is_truncated
            rows.append((obs[:-1], obs[1:], rewards, ends))
        return found

    def estimated(self, *args, **kwargs):
        out = estimate(self, *args, **kwargs)
        batch = out["default_policy"]
        batches.append({key: np.asarray(batch[key]) for key in ("obs", "value_targets")})
        return out

    monkeypatch.setattr(SingleAgentEnvRunner, "sample", recorded)
    monkeypatch.setattr(GeneralAdvantageEstimation, "__call__", estimated)
    algorithm = train(80, **FLAT)
    algorithm.stop()

    obs, next_obs, rewards, ends = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    assert len(obs) == 80
    check_transitions(obs, next_obs, rewards, ends[:, 0], ends[:, 1])

    obs, targets = (
        np.concatenate([batch[key] for batch in batches]) for key in ("obs", "value_targets")
    )
    number, chunk = obs[:, 0], obs[:, 1]
    won, cut = (number % 2 == 1) & (chunk == 1), (number % 2 == 0) & (chunk == 2)
    assert won.sum() >= 2 and cut.sum() >= 2
    np.testing.assert_allclose(targets[won], 1.0, atol=1e-5)  # nothing follows a success
    assert (np.abs(targets[cut]) > 1e-6).all()  # something follows the time limit
