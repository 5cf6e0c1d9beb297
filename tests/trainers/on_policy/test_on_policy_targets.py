"""Targets: which chunks are learnt from, and with which advantage; metrics of a rollout."""

import pytest
import torch
from on_policy_toys import toy_rollout

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.config import GRPOConfig, PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.loop import targets_of
from vla_gym_trainers.on_policy.targets import grpo_targets, ppo_targets, rollout_metrics


def played(ends, *, group_size=2, episodes=1, discount=1.0):
    """A rollout by hand: ``ends[row]`` is (chunks, how the last one ended)."""
    rollout = toy_rollout(len(ends), episodes, 4, group_size)
    data = rollout.data
    for row, (chunks, how) in enumerate(ends):
        data["valid"][row, :chunks] = True
        data["executed"][row, :chunks] = 4
        data["discounts"][row, :chunks] = discount
        if how == "won":
            data["terminated"][row, chunks - 1] = True
            data["rewards"][row, chunks - 1] = 1.0
        if how == "late":
            data["truncated"][row, chunks - 1] = True
    return rollout


def test_grpo_gives_an_episodes_advantage_to_its_chunks():
    # Groups: (0, 1) win and lose; (2, 3) both win; (4, 5) one lost with its worker.
    rollout = played([(2, "won"), (4, "late"), (1, "won"), (3, "won"), (2, "won"), (2, "lost")])
    targets = grpo_targets(rollout, aggregation="tokens")
    # Returns 1, 0: mean 0.5, standard deviation of a sample sqrt(0.5) -> +-0.5 / 0.7071.
    assert targets.advantages[0, 0].item() == pytest.approx(0.70711, abs=1e-4)
    assert targets.advantages[1, 3].item() == pytest.approx(-0.70711, abs=1e-4)
    kept = torch.zeros(6, 4, dtype=torch.bool)
    kept[0, :2], kept[1, :4] = True, True
    assert torch.equal(targets.keep, kept) and targets.returns is None
    # Two chunks at 0.7071 and four at -0.7071: mean -0.2357, standard deviation 2/3.
    assert targets.metrics == {
        "rollout/episodes_kept": 2.0,
        "rollout/groups_kept": 1 / 3,
        "rollout/advantage_mean": pytest.approx(-0.2357, abs=1e-4),
        "rollout/advantage_std": pytest.approx(2 / 3, abs=1e-4),
    }
    # By length: 8 and 16 control steps, so 1/3 is taken off, and the chunks' mean is 0.
    even = grpo_targets(rollout, baseline="length", aggregation="tokens")
    scaled = [2 / 3 / 0.70711, -1 / 3 / 0.70711]
    assert even.advantages[:2, 0].tolist() == pytest.approx(scaled, abs=1e-4)
    assert even.metrics["rollout/advantage_mean"] == pytest.approx(0.0, abs=1e-6)


def test_grpo_can_weigh_episodes_alike():
    # 2 and 4 chunks of 4 control steps; the second group has no contrast and does not count.
    rollout = played([(2, "won"), (4, "late"), (1, "won"), (3, "won")])
    rollout.data["executed"][0, 1] = 2
    targets = grpo_targets(rollout)
    # 6 and 16 control steps, 11 on average: 0.70711 * 11 / 6 and -0.70711 * 11 / 16.
    assert targets.advantages[:2, 0].tolist() == pytest.approx([1.29636, -0.48614], abs=1e-4)
    weighed = (targets.advantages * rollout.data["executed"] * targets.keep).sum(dim=1)
    assert weighed[:2].tolist() == pytest.approx([7.7782, -7.7782], abs=1e-3)
    # So over all tokens the mean is 0, and the mean size is as without: 0.70711.
    assert weighed[:2].abs().sum().item() / 22 == pytest.approx(0.70711, abs=1e-4)


def test_an_episode_with_a_chunk_that_is_not_valid_does_not_count():
    rollout = played([(2, "won"), (4, "late"), (3, "won")], group_size=3)
    rollout.data["valid"][2, 1] = False
    assert grpo_targets(rollout).keep.any(dim=1).tolist() == [True, True, False]


def test_discounts_make_a_late_success_worth_less():
    # gamma ** 4 = 0.5: wins after 1 and 3 chunks return 1 and 0.25.
    targets = grpo_targets(
        played([(1, "won"), (3, "won"), (4, "late")], group_size=3, discount=0.5),
        aggregation="tokens",
    )
    # Mean 0.41667, standard deviation of a sample 0.52042.
    expected = [(x - 0.41667) / 0.52042 for x in (1.0, 0.25, 0.0)]
    assert targets.advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-4)


def test_ppo_standardises_over_the_students_chunks():
    rollout = played([(2, "won"), (2, "late"), (1, "won")], group_size=1, discount=0.5)
    data = rollout.data
    data["values"].fill_(0.0)
    data["next_values"][1, 1] = 0.6
    # lam 1: A = returns: row 0: 0.5, 1; row 1: 0.15, 0.3; row 2: 1.
    targets = ppo_targets(rollout, 1.0)
    expected = torch.tensor([[0.5, 1.0], [0.15, 0.3], [1.0, 0.0]])
    torch.testing.assert_close(targets.returns[:, :2], expected)
    assert targets.metrics["rollout/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    data["by_teacher"][2, 0] = True
    student = data["valid"] & ~data["by_teacher"]
    standard = ppo_targets(rollout, 1.0).advantages[student]
    assert standard.mean().abs() < 1e-6 and standard.std().item() == pytest.approx(1.0, rel=1e-5)
    data["values"][:, :2] = expected
    data["next_values"][0, 0] = 1.0
    data["next_values"][1, 0] = 0.3
    perfect = ppo_targets(rollout, 0.9)
    torch.testing.assert_close(perfect.returns[:, :2], expected)
    assert perfect.metrics["rollout/explained_variance"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GRPOConfig(aggregation="tokens"), {"aggregation": "tokens"}),
        (GRPOConfig(baseline="length"), {"baseline": "length"}),
        (PPOConfig(gae_lambda=0.5), {"gae_lambda": 0.5}),
    ],
)
def test_the_configuration_reaches_the_targets(config, expected):
    rollout = played([(2, "won"), (4, "late"), (1, "won"), (3, "late")], discount=0.5)
    rollout.data["values"].fill_(0.3)
    found = targets_of(config, rollout, ProcessGroup())
    make = ppo_targets if isinstance(config, PPOConfig) else grpo_targets
    wanted = make(rollout, **expected)
    torch.testing.assert_close(found.advantages, wanted.advantages)
    assert torch.equal(found.keep, wanted.keep) and found.metrics == wanted.metrics


def test_metrics_of_a_rollout():
    # The last one was lost in its first chunk.
    rollout = played([(2, "won"), (4, "late"), (1, "won"), (2, "lost"), (0, "lost"), (0, "lost")])
    rollout.data["by_teacher"][1] = True
    rollout.data["task_id"][:] = torch.tensor([4, 4, 7, 7, 9, 9])[:, None]
    metrics = rollout_metrics(rollout, tasks=(4, 7, 9))
    assert metrics == {
        "rollout/env_steps": 36.0,
        "rollout/chunks": 9.0,
        "rollout/episodes": 3.0,
        "rollout/teacher_share": 4 / 9,
        "rollout/success": 2 / 3,
        "rollout/success_task_4": 1 / 2,  # none of 9's ended
        "rollout/success_task_7": 1.0,
        "rollout/episodes_lost": 3.0,
    }


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="whole episodes"):
        grpo_targets(played([(4, "none")], group_size=1, episodes=None))
