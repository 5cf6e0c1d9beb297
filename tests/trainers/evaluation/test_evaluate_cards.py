"""vla-gym eval: cards, tables, shards, resuming, comparisons, films, mistakes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import imageio.v3 as iio
import numpy as np
import pytest
from spoilt_files import spoil

from vla_gym.cli import main as cli
from vla_gym.errors import ConfigError
from vla_gym.rollout.video import GREEN
from vla_gym_trainers.evaluation import command
from vla_gym_trainers.evaluation.cards import RowsFile, check_out, read_card
from vla_gym_trainers.evaluation.command import main, run_eval
from vla_gym_trainers.evaluation.config import EvalConfig, MergeConfig
from vla_gym_trainers.evaluation.merge_command import run_merge
from vla_gym_trainers.evaluation.tables import print_results, title_of
from vla_gym_trainers.runs.settings import TEST_SEED

# In one process: workers are the other file's subject, and take seconds to start.
EXPERT = EvalConfig(
    policy="expert", task_ids=(7, 8), episodes=2, num_envs=2, workers=0, progress=False
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The card of the evaluation that the tests cut into pieces, as it is on disk."""
    out = tmp_path_factory.mktemp("whole")
    card = run_eval(dataclasses.replace(EXPERT, out=out))
    assert json.loads((out / "card.json").read_text()) == card
    assert {path.name for path in out.iterdir()} == {"card.json", ".card.json.lock"}
    return {**card, "file": out / "card.json"}


def test_every_state_of_every_task_is_there_once(whole: dict[str, Any]) -> None:
    rows = whole["results"]["episodes"]
    keys = [(row["suite"], row["task_id"], row["init_state_id"]) for row in rows]
    assert keys == [("goal", 7, 0), ("goal", 7, 1), ("goal", 8, 0), ("goal", 8, 1)]
    for row in rows:
        assert row["terminated"] == row["success"] and row["truncated"] != row["terminated"]
        assert 0 < row["length"] < 300 if row["success"] else row["length"] == 300
    assert whole["results"]["total"]["num_successes"] == sum(row["success"] for row in rows) >= 3
    assert whole["environment"]["asset_pack"] == "lite"
    assert whole["versions"]["mujoco"] and whole["wall_seconds"] > 0
    assert whole["protocol"]["assets"]["digest"] == whole["environment"]["asset_pack_digest"]


def test_shards_cover_everything_once() -> None:
    config = EvalConfig(suite=("libero_spatial", "object"), task_ids=(0, 4), episodes=5)
    starts = config.starts()
    assert len(starts) == len(set(starts)) == 20 and starts[0].suite == "spatial"
    parts = [dataclasses.replace(config, shards=f"{i}/3").my_starts() for i in (1, 2, 3)]
    assert sorted(sum(parts, ())) == sorted(starts)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_sampled_layouts_in_place_of_the_official_states(whole, tmp_path):
    config = dataclasses.replace(EXPERT, layouts="sampled", task_ids=(8,))
    card = run_eval(config)
    first, second = card["results"]["episodes"]
    assert first["success"] and first["init_state_id"] == -1
    assert card["protocol"]["first_seed"] == first["seed"] == second["seed"] - 1 == TEST_SEED
    assert title_of(card["protocol"]).endswith("assets lite, layouts from seed 2000000000")
    parts = [tmp_path / f"part{i}.json" for i in (1, 2)]
    for i, part in enumerate(parts, 1):
        run_eval(dataclasses.replace(config, shards=f"{i}/2", out=part))
    assert run_merge(MergeConfig(tuple(parts)))["results"] == card["results"]
    assert dataclasses.replace(config, episodes=None).num_states() == 50
    dataclasses.replace(config, episodes=60).check()  # there are 50 official states
    with pytest.raises(ConfigError, match="--episodes"):
        dataclasses.replace(EXPERT, episodes=60).check()
    with pytest.raises(ConfigError, match="asks for official states"):
        dataclasses.replace(config, protocol="openvla").check()
    with pytest.raises(ConfigError, match="layouts: expected 'official' or 'sampled'"):
        EvalConfig(layouts="sample").check()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="lacks 2 of 2.*--layouts"):
        run_eval(dataclasses.replace(config, paired=whole["file"]))


def test_suites_in_one_environment_play_the_same_episodes() -> None:
    """Task 17 of goal+spatial is task 7 of spatial; the expert acts as in a suite of its own."""
    alone = dataclasses.replace(EXPERT, task_ids=(7,), episodes=1, confusion=True)
    mixed = dataclasses.replace(alone, suite=("goal+spatial",), task_ids=(7, 17))
    rows = run_eval(mixed)["results"]["episodes"]
    assert [(row["suite"], row["task_id"]) for row in rows] == [
        ("goal+spatial", 7),
        ("goal+spatial", 17),
    ]
    own = run_eval(dataclasses.replace(alone, suite=("goal", "spatial")))["results"]["episodes"]
    for row, wanted in zip(rows, own, strict=True):
        assert row["success"] and row["achieved"] == row["task_id"]
        assert (row["length"], row["achieved_step"]) == (wanted["length"], wanted["achieved_step"])


def test_merged_shards_equal_the_whole(whole: dict[str, Any], tmp_path: Path) -> None:
    files = []
    for i in (1, 2):
        files.append(tmp_path / f"part{i}.json")
        part = run_eval(dataclasses.replace(EXPERT, shards=f"{i}/2", out=files[-1]))
        assert part["shard"] == [i, 2] and len(part["results"]["episodes"]) == 2
    # Given in any order.
    merged = run_merge(MergeConfig((files[1], files[0]), out=tmp_path / "all.json"))
    assert merged["results"] == whole["results"]
    assert merged["protocol"] == whole["protocol"] and merged["versions"] == whole["versions"]
    assert read_card(tmp_path / "all.json").content == merged

    half = run_merge(MergeConfig((files[0],), partial=True, out=tmp_path / "half.json"))
    assert half["results"]["total"]["num_episodes"] == 2
    again = run_merge(MergeConfig((tmp_path / "half.json", files[1])))  # step by step
    for key in ("gl_renderers", "machines"):
        assert again["environment"][key] == merged["environment"][key]
    with pytest.raises(ConfigError, match="2 of 4 episodes are missing"):
        run_merge(MergeConfig((files[0],)))
    with pytest.raises(ConfigError, match="goal 7 state 0 is in .*part1.json and again in"):
        run_merge(MergeConfig((files[0], whole["file"])))
    for key, value in (("physics", "exact"), ("assets.digest", "0"), ("versions.mujoco", "4.0")):
        place = key if key.startswith("versions") else f"protocol.{key}"
        odd = spoil(Path(shutil.copy(files[1], tmp_path / "odd.json")), place, value)
        with pytest.raises(ConfigError, match=rf"differ in \S*{key}: .*{value}"):
            run_merge(MergeConfig((files[0], odd)))


def test_a_run_cut_short_goes_on(whole, tmp_path, monkeypatch):
    config = dataclasses.replace(EXPERT, out=tmp_path / "run")
    append = RowsFile.append

    def cut(self: RowsFile, *args: Any) -> None:
        append(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="--resume"):
        patch.setattr(RowsFile, "append", cut)
        main(config)
    rows = tmp_path / "run" / "card.rows.jsonl"
    with rows.open("a") as file:
        file.write('{"episode": {"suite": "go')  # killed while it wrote
    with pytest.raises(ConfigError, match="is there already: add --resume"):
        run_eval(config)
    with pytest.raises(ConfigError, match="differ in protocol.episodes: 3 and 2"):
        run_eval(dataclasses.replace(config, resume=True, episodes=3))

    played: list[int] = []
    play = command.play

    def counting(policy: Any, starts: Any, **settings: Any) -> Any:
        played.extend([len(starts)] if starts else [])
        return play(policy, starts, **settings)

    monkeypatch.setattr(command, "play", counting)
    first, episode = rows.read_text().splitlines()[:2]
    for line in (episode, episode.replace('"init_state_id": 0', '"init_state_id": 49')):
        (tmp_path / "run" / "twice.rows.jsonl").write_text(f"{first}\n{episode}\n{line}\n")
        with pytest.raises(ConfigError, match="episodes twice, or of another evaluation"):
            run_eval(dataclasses.replace(config, resume=True, out=tmp_path / "run" / "twice.json"))
    elsewhere = json.loads(episode)["world"]["cpu"]
    replayed = episode.replace('"length"', '"replays": 2, "length"')
    rows.write_text(f"{first}\n{replayed}\n")
    with (
        check_out(tmp_path / "run", resume=True),
        pytest.raises(ConfigError, match="Another process is writing .*card.json"),
    ):
        run_eval(dataclasses.replace(config, resume=True))
    card = run_eval(dataclasses.replace(config, resume=True))
    assert card["environment"]["worker_restarts"] == 2
    assert card["environment"]["gl_renderer"] == whole["environment"]["gl_renderer"]
    assert sum(row.pop("replays", 0) for row in card["results"]["episodes"]) == 2
    assert played == [3] and not rows.exists()
    assert card["results"] == whole["results"]
    # A complete run is only shown again.
    with monkeypatch.context() as patch:
        other = {**command.machine_facts(), "cpu": "another"}
        patch.setattr(command, "machine_facts", lambda: other)
        again = run_eval(dataclasses.replace(config, resume=True))
    assert played == [3] and again["environment"] == card["environment"]
    assert again["environment"]["worker_restarts"] == 2
    # A run that went on elsewhere names both machines.
    (tmp_path / "two").mkdir()
    cut_short = f"{first}\n{episode.replace(elsewhere, 'another')}\n"
    (tmp_path / "two" / "card.rows.jsonl").write_text(cut_short)
    both = run_eval(dataclasses.replace(config, resume=True, out=tmp_path / "two"))
    assert [m["cpu"] for m in both["environment"]["machines"]] == ["another", elsewhere]
    assert "cpu" not in both["environment"]
    with pytest.raises(ConfigError, match="differ in shard"):
        run_eval(dataclasses.replace(config, resume=True, shards="1/2"))


# imageio's ffmpeg reader leaves its pipes to the garbage collector.
@pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
def test_pairing_films_and_tables(whole: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "card.json"
    config = dataclasses.replace(EXPERT, task_ids=(8,), episodes=1, out=out)
    card = run_eval(dataclasses.replace(config, paired=whole["file"], films=1, confusion=True))
    assert card["results"]["paired"]["total"]["both"] == 1
    assert card["results"]["paired"]["policy"] == {"kind": "expert"}
    assert card["results"]["confusion"][0]["matrix"] == {"8": {"8": 1}}
    (video,) = (Path(path) for path in card["films"])
    assert video == tmp_path / "films" / "goal_8_state_00_success.mp4"
    length = card["results"]["episodes"][0]["length"]
    film = iio.imread(video)
    assert len(film) == length + 1 + 30  # the reset, and the last picture held
    # The border of an episode that succeeded.
    assert np.abs(film[-1][0].astype(int) - GREEN).max() <= 20 < np.abs(film[0][0] - GREEN).max()
    assert json.loads(out.read_text()) == card

    print_results(card["results"], title_of(card["protocol"]))
    text = capsys.readouterr().out
    for expected in ("goal 8", "put the bowl on the plate", "1/1", "100.0 %", "20.7 .. 100.0"):
        assert expected in text, expected
    for expected in ("scripted expert", "McNemar", "1 of 1 episodes decided"):
        assert expected in text, expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--suite", "goal", "goal"], "--suite needs at least one value, each once"),
        (["--episodes", "51"], "--episodes must be in 1..50, got 51"),
        (["--chunk-len", "9"], "--chunk-len must be in 1..8"),
        (["--shards", "3/2"], "--shards must be i/n"),
        (["--shards", "900/1000"], "500 episodes, give at most 500 parts"),
        (["--temperature", "1"], "add --head token"),
        (["--policy", "random", "--vla", "mini"], "--vla has nothing to do with --policy random"),
        (["--policy", "expert", "--phrasing", "held-out"], "--phrasing belongs to --policy vla"),
        (["--policy", "expert", "--suite", "90"], "No expert for task"),
        (["--vla", "nonsense"], "No checkpoint 'nonsense'"),
        (["--suite", "goal", "goal-object"], "goal-object' needs yellow_cabinet: the assets in"),
        (["--phrasing", "held-out", "--suite", "goal", "goal-lan"], "No other words are known for"),
        (["--films", "1"], "--films needs --out"),
        (["--confusion", "--suite", "object"], "--confusion needs a suite"),
        (["--paired", "/nonexistent.json"], "/nonexistent.json does not exist"),
        (["--out", "/proc/x"], "cannot be written"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], expected: str, one_error: Any) -> None:
    assert expected in one_error(cli.main, "eval", *arguments)
