"""Known answers: intervals, paired tests, what episodes add up to."""

from __future__ import annotations

from typing import Any

import pytest

from vla_gym.errors import ConfigError
from vla_gym.rollout import Episode, Start
from vla_gym_trainers.evaluation.films import choose
from vla_gym_trainers.evaluation.statistics import sign_test, wilson_interval
from vla_gym_trainers.evaluation.summary import compare, summarize


def episode(task_id: int, state: int, success: bool, length: int = 10, **more: Any) -> Episode:
    return Episode(Start("goal", task_id, state), success, success, not success, length, **more)


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # p = 0.5, n = 10, z = 1.959964: centre 0.5, half z sqrt(.025 + z^2/400) / (1 + z^2/10)
        (5, 10, 0.2366, 0.7634),
        (0, 10, 0.0, 0.2775),  # upper = z^2 / (n + z^2) = 3.8415 / 13.8415
        (10, 10, 0.7225, 1.0),
        (8, 50, 0.0834, 0.2851),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_known_answers(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=2e-4)


@pytest.mark.parametrize("successes", [3, -1])
def test_wilson_refuses_nonsense(successes: int) -> None:
    with pytest.raises(ConfigError):
        wilson_interval(successes, 2)


@pytest.mark.parametrize(
    ("wins", "losses", "p_value"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),  # 2 * 1/2
        (0, 5, 2 / 32),
        (8, 2, 2 * (1 + 10 + 45) / 1024),
        (3, 3, 1.0),  # 2 * (1 + 6 + 15 + 20) / 64 > 1
        (1100, 0, 0.0),  # 2**-1099 is less than any float
        (520, 510, 0.7791639685715166),  # summed in integers; 2**1030 is no float
    ],
)
def test_sign_test_known_answers(wins: int, losses: int, p_value: float) -> None:
    assert sign_test(wins, losses) == pytest.approx(p_value)


def test_summary_known_answers() -> None:
    episodes = [episode(3, 0, True, 10), episode(3, 1, False, 300)]
    episodes += [episode(8, state, state < 3, 20 + state) for state in range(4)]
    results = summarize(episodes)
    assert [row["success_rate"] for row in results["tasks"]] == [0.5, 0.75]
    assert [row["mean_success_length"] for row in results["tasks"]] == [10.0, 21.0]
    total = results["total"]
    assert (total["num_successes"], total["num_episodes"], total["num_tasks"]) == (4, 6, 2)
    assert total["mean_over_tasks"] == 0.625  # of the tasks, not of the episodes
    # 2 of 4, z = 1.96: centre 0.5, half width z sqrt(1/16 + z^2/64) / (1 + z^2/4)
    four = summarize([episode(0, i, i < 2) for i in range(4)])["total"]
    assert four["wilson_95"] == pytest.approx([0.15, 0.85], abs=1e-3)


def test_confusion_known_answers() -> None:
    episodes = [
        episode(1, 0, True, achieved=1, achieved_step=5),
        episode(1, 1, False, achieved=8, achieved_step=7),
        episode(1, 2, True, achieved=8, achieved_step=7),  # the other goal came first
        episode(8, 0, False),
    ]
    (confusion,) = summarize(episodes, confusion=True)["confusion"]
    assert confusion["matrix"] == {"1": {"1": 1, "8": 2}, "8": {}}
    assert (confusion["decided"], confusion["right"]) == (3, 1)
    assert confusion["right_share"] == pytest.approx(1 / 3)


def test_comparison_known_answers() -> None:
    mine = [episode(t, i, i < 5) for t in (1, 2) for i in range(6)]
    other = [episode(t, i, i == 5 and t == 2) for t in (2, 1) for i in reversed(range(6))]
    result = compare(mine, other)
    first, second = result["tasks"]
    assert (first["wins"], first["losses"], first["both"], first["neither"]) == (5, 0, 0, 1)
    assert (second["wins"], second["losses"]) == (5, 1)
    assert first["p_value"] == pytest.approx(2 / 32)
    assert result["total"]["p_value"] == pytest.approx(2 * (1 + 11) / 2**11)
    with pytest.raises(ConfigError, match=r"lacks 1 of 12 episodes \(goal 1 state 0"):
        compare(mine, other[:-1])


def test_films_show_successes_and_failures_of_each_task() -> None:
    episodes = [episode(t, i, success=i % 2 == 1) for t in (4, 2) for i in range(6)]
    chosen = [(e.task_id, e.init_state_id) for e in choose(episodes, 2)]
    assert chosen == [(t, i) for t in (4, 2) for i in (1, 3, 0, 2)]
