"""TD3+BC on the real environment: a short run that must work, a long one that must win."""

from __future__ import annotations

import json
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from vla_gym_trainers.runs.sb3_vec_env import make_sb3_vec_env
from vla_gym_trainers.runs.settings import load_preset
from vla_gym_trainers.td3.train import TD3RunConfig, train_td3


def test_short_run_on_libero(tmp_path: Path) -> None:
    config = TD3RunConfig(
        task_ids=(7,),  # whose episodes are the shortest
        total_timesteps=48,
        learning_starts=32,
        critic_warmup_steps=20,
        batch_size=32,
        eval_states=1,
        run_dir=tmp_path,
        progress=False,
    )
    run = train_td3(config)
    card = json.loads((run.run_dir / "card.json").read_text())
    assert card["environment"]["asset_pack"] == "lite"
    assert len(card["environment"]["asset_pack_digest"]) == 64
    assert card["environment"]["gl_renderer"]
    assert card["results"]["training"]["chunks"] == 48
    assert list(card["results"]["training"]["success_by_task"]) == ["7"]
    assert card["results"]["evaluation"]["policy"]["total"]["num_episodes"] == 1


def test_a_chunk_in_pieces_is_the_chunk() -> None:
    """Physics and final frames are equal; the VLA sees as many frames more as there are pieces."""
    settings = {"task_ids": [5], "gamma": 0.99, "workers": 0}
    with (
        closing(make_sb3_vec_env("LiberoVLA-goal-v0", 1, **settings)) as whole,
        closing(make_sb3_vec_env("LiberoVLA-goal-v0", 1, stride=2, **settings)) as pieces,
    ):
        whole.seed(3), pieces.seed(3)
        a, b = whole.reset(), pieces.reset()
        for _ in range(4):
            for key in a:
                np.testing.assert_array_equal(a[key], b[key])
            a, _, _, theirs = whole.step(a["vla_action"])
            b, _, _, infos = pieces.step(b["vla_action"])
            assert len(infos[0]["pieces"]) == 4
            assert infos[0]["executed_steps"] == theirs[0]["executed_steps"] == 8
            tokens = [piece.obs["rl_token"] for piece in infos[0]["pieces"]]
            assert min(np.abs(x - y).max() for x, y in pairwise(tokens)) > 0
            np.testing.assert_array_equal(tokens[-1], b["rl_token"][0])
            assert infos[0]["pieces"][0].obs["vla_action"].shape == (8, 7)


@pytest.mark.slow
def test_demo_preset_beats_the_vla(tmp_path: Path) -> None:
    """About 5 minutes on 2 cores; by chance the sign test passes less than once in 100."""
    config = load_preset(TD3RunConfig, "td3_demo")
    config.run_dir, config.progress = tmp_path, False
    paired = train_td3(config).card["results"]["evaluation"]["policy"]["paired"]["total"]
    assert paired["wins"] > paired["losses"]
    assert paired["p_value"] < 0.01
