"""TD3+BC on the real environment: a short run that must work, a long one that must win."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_demo_preset_beats_the_vla(tmp_path: Path) -> None:
    """About 5 minutes on 2 cores; by chance the sign test passes less than once in 100."""
    config = load_preset(TD3RunConfig, "td3_demo")
    config.run_dir, config.progress = tmp_path, False
    paired = train_td3(config).card["results"]["evaluation"]["policy"]["paired"]["total"]
    assert paired["wins"] > paired["losses"]
    assert paired["p_value"] < 0.01
