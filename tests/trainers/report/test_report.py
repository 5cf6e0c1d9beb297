"""vla-gym report: known numbers in the page, grouping, escaping, what is missing, mistakes."""

from __future__ import annotations

import json
import shutil
from base64 import b64decode
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from report_runs import BEGAN, against_vla, eval_card, grpo_run, paired, td3_run, write_logs
from spoilt_files import spoil

from vla_gym.cli import main as cli
from vla_gym.errors import ConfigError
from vla_gym.rollout.video import write_video
from vla_gym_trainers.evaluation.statistics import wilson_interval
from vla_gym_trainers.report import plots
from vla_gym_trainers.report.curves import metric, seconds_of
from vla_gym_trainers.report.data import read_rows, read_sources, short_names
from vla_gym_trainers.report.learning import time_shares
from vla_gym_trainers.report.page import make_page
from vla_gym_trainers.runs.result_card import write_json
from vla_gym_trainers.runs.run_dir import RunDir

# Outcomes of two seeds on four states.
OK = ((True, True, False, False), (True, True, True, False))


class Page(HTMLParser):
    """What a browser makes of a page: elements, text, and the numbers in its data block."""

    VOID = ("meta", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open  # every element is closed
        self.data: dict[str, Any] = json.loads(self.scripts[0])
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open[-1:] == ["script"] else self.words).append(data)


def labels_of(figure: Figure) -> bytes:
    """What a plot says at its y axis, in the place of the drawing."""
    labels = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    return " ".join(labels).encode()


def page_of(*paths: Path, **options: Any) -> Page:
    """Return a page without drawings, which take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "svg_of", labels_of)
        return Page(make_page(paths, **options))


def films_of(page: Page) -> list[dict[str, str | None]]:
    images = [attributes for name, attributes in page.elements if name == "img"]
    return [image for image in images if (image["src"] or "").startswith("data:image/jpeg;base64,")]


def plots_of(page: Page) -> str:
    """Return what all plots say."""
    begin = "data:image/svg+xml;base64,"
    sources = [attributes["src"] or "" for name, attributes in page.elements if name == "img"]
    found = [b64decode(src.removeprefix(begin)) for src in sources if src.startswith(begin)]
    return b"".join(found).decode()


def test_two_seeds_are_one_curve_with_their_range(tmp_path):
    won = [paired({9: [False] * 4}, {9: ok}) for ok in OK]
    one = td3_run(tmp_path / "a", [0.4, 0.5], seed=0, results=won[0])
    two = td3_run(tmp_path / "b", [0.6, 0.9], seed=10_000, results=won[1])
    page = page_of(one.path, two.path)
    assert "td3 goal 9: mean over tasks and 2 seeds 62.5 % (50.0 .. 75.0)." in page.text
    (group,) = page.data["groups"]
    assert group["label"] == "td3 goal 9" and group["runs"] == ["a", "b"]
    curve = group["success"]["greedy"]["steps"]
    assert curve["unit"] == "control steps" and curve["band"] == "min..max"
    assert curve["x"] == [8000, 16000]  # the log says how many a chunk had
    assert curve["mean"] == pytest.approx([0.5, 0.7])
    assert curve["low"] == pytest.approx([0.4, 0.5])
    assert curve["high"] == pytest.approx([0.6, 0.9])
    wall = group["success"]["greedy"]["seconds"]
    assert wall["unit"] == "seconds" and wall["x"] == [100, 200]
    # training episodes: 0.1 less, 800 control steps and 10 seconds earlier
    training = group["success"]["training"]
    assert training["steps"]["x"] == [7200, 15200] and training["seconds"]["x"] == [90, 190]
    assert training["steps"]["mean"] == pytest.approx([0.4, 0.6])


def test_one_run_has_wilsons_band(tmp_path):
    run = td3_run(tmp_path / "a", [0.5, 0.75], eval_layouts=20)
    (group,) = page_of(run.path).data["groups"]
    curve = group["success"]["greedy"]["steps"]
    assert curve["band"] == "Wilson"
    bounds = [wilson_interval(10, 20), wilson_interval(15, 20)]
    assert curve["low"] == pytest.approx([low for low, _ in bounds], rel=1e-5)
    assert curve["high"] == pytest.approx([high for _, high in bounds], rel=1e-5)
    training = group["success"]["training"]["steps"]  # 50 episodes so far, then 100
    assert training["high"][0] == pytest.approx(wilson_interval(20, 50)[1], rel=1e-5)
    assert training["high"][1] == pytest.approx(wilson_interval(65, 100)[1], rel=1e-5)


def test_seeds_of_unlike_length_are_shown_where_all_are(tmp_path):
    one = td3_run(tmp_path / "a", [0.2, 0.4, 0.6], seed=0)
    two = td3_run(tmp_path / "b", [0.4, 0.6], seed=1)
    curve = page_of(one.path, two.path).data["groups"][0]["success"]["greedy"]["steps"]
    assert curve["x"] == [8000, 16000] and curve["mean"] == pytest.approx([0.3, 0.5])


def test_other_settings_make_another_group(tmp_path):
    base = td3_run(tmp_path / "a", [0.4], seed=0)
    same = td3_run(tmp_path / "b", [0.4], seed=1, workers=2, checkpoint_every=7)
    other = td3_run(tmp_path / "c", [0.4], seed=0, bc_weight=0.0)
    page = page_of(base.path, same.path, other.path)
    labels = [(group["label"], group["runs"]) for group in page.data["groups"]]
    assert labels == [("td3, bc_weight=1.0", ["a", "b"]), ("td3, bc_weight=0.0", ["c"])]
    assert page.data["differences"]["bc_weight"] == [1.0, 1.0, 0.0]
    assert page.data["differences"]["seed"] == [0, 1, 0]
    assert "learning_rate" not in page.data["differences"]
    assert "checkpoint_every" not in page.data["differences"]


def test_groups_that_no_setting_tells_apart_are_named_by_their_runs(tmp_path):
    new, old = (td3_run(tmp_path / name, [0.4]) for name in ("new", "old"))
    config = json.loads(old.config.read_text())
    del config["demo_starts"]  # of a version that did not have it
    write_json(old.config, config)
    groups = page_of(new.path, old.path).data["groups"]
    assert [group["label"] for group in groups] == ["td3: new", "td3: old"]


def test_per_task_bars_with_intervals_and_exact_p(tmp_path):
    run = td3_run(tmp_path / "a", [0.4], results=against_vla(), task_ids=(9, 8))
    page = page_of(run.path)
    (evaluation,) = page.data["evaluations"]
    nine, eight = evaluation["tasks"]
    assert (nine["won"], nine["count"], nine["baseline"]) == (10, 10, [4, 10])
    assert (nine["wins"], nine["losses"]) == (6, 0)
    assert nine["p_value"] == pytest.approx(2 / 2**6)
    assert nine["instruction"] == "put the wine bottle on the rack"
    assert (eight["won"], eight["baseline"], eight["wins"], eight["losses"]) == (5, [6, 10], 0, 1)
    assert eight["p_value"] == 1.0
    total = evaluation["total"]
    assert (total["won"], total["count"], total["baseline"]) == (15, 20, [10, 20])
    assert (total["wins"], total["losses"]) == (6, 1)
    assert total["p_value"] == pytest.approx(2 * (1 + 7) / 2**7)
    assert evaluation["mean_over_tasks"] == 0.75 and evaluation["baseline_mean_over_tasks"] == 0.5
    assert "goal 9 put the wine bottle on the rack 4/10 10/10 6 0 0.031" in page.text
    assert "goal 9" in plots_of(page)


def test_grpo_says_where_the_time_goes_and_how_stale_it_was(tmp_path):
    run = grpo_run(tmp_path / "g")
    page = page_of(run.path)
    (source,), _ = read_sources([run.path])
    # 2 x (24 forward, 36 the rest of collecting, 20 learning) of 200 seconds
    assert [seconds for _, seconds in time_shares(source)] == pytest.approx([48, 72, 40, 40])
    assert "VLA, forward 0.8 24 %" in page.text and "learning 0.7 20 %" in page.text
    assert "0 30 chunks 75.0 %" in page.text and "1 10 chunks 25.0 %" in page.text
    greedy = page.data["groups"][0]["success"]["greedy"]
    assert greedy["steps"] == greedy["steps"] | {"unit": "control steps", "x": [0], "mean": [0.5]}
    assert greedy["seconds"]["x"] == [20]  # 80 seconds before the first clock, which says 100
    waiting = grpo_run(tmp_path / "async", ahead=1)
    (source,), _ = read_sources([waiting.path])
    assert [seconds for _, seconds in time_shares(source)] == pytest.approx([120, 40, 40])


def test_a_setting_that_one_trainer_lacks_is_no_difference(tmp_path):
    runs = [td3_run(tmp_path / "t", [0.4, 0.5]), grpo_run(tmp_path / "g")]
    runs.append(td3_run(tmp_path / "u", [0.4], bc_weight=0.5))
    found = page_of(*(run.path for run in runs)).data["differences"]
    assert found["bc_weight"] == [1.0, None, 0.5] and "baseline" not in found


def test_pauses_before_a_resume_do_not_count(tmp_path):
    logs = [(10, 10.0, {"time/time_elapsed": 10}), (20, 20.0, {"time/time_elapsed": 20})]
    logs += [(22, 5002.0, {"eval/success": 0.5})]  # resumed at 5000
    logs += [(30, 5005.0, {"time/time_elapsed": 5}), (40, 5015.0, {"time/time_elapsed": 15})]
    logs += [(40, 5018.0, {"eval/success": 0.5})]
    run = RunDir(tmp_path)
    write_logs(run, logs)
    seconds = seconds_of(read_rows(run.metrics))
    assert seconds == pytest.approx([10, 20, 25, 25, 35, 38], abs=0.01)


def test_a_card_alone_gives_bars_and_the_curve_that_it_holds(tmp_path):
    history = [[1000, 0.5, {"9": 0.5}], [2000, 0.75, {"9": 0.75}]]
    run = td3_run(tmp_path / "a", [0.5], results=against_vla())
    card = json.loads(run.card.read_text())
    card["results"]["training"]["closed_loop"] = {"history": history}
    write_json(tmp_path / "committed.json", card)
    page = page_of(tmp_path / "committed.json")
    (group,) = page.data["groups"]
    assert group["success"]["greedy"]["steps"]["mean"] == [0.5, 0.75]
    assert "seconds" not in group["success"]["greedy"]
    assert "No wall time (a card alone has none): committed.json." in page.text
    assert page.data["evaluations"][0]["total"]["won"] == 15


def test_a_running_run_says_what_is_missing(tmp_path):
    run = td3_run(tmp_path / "a", [0.5], card=False)
    with open(run.metrics, "ab") as file:
        file.write(b'{"step": 2000, "wal')  # the process is writing
    text = page_of(run.path).text
    assert "no result card yet, 1k chunks logged" in text
    assert "no evaluation on official states, it has no result card yet" in text
    assert "Versions stand in the result card, which a lacks." in text
    assert "No films: a" in text and "No staleness logged: a." in text
    assert "Where the time goes was not logged by a." in text


def test_eval_cards_are_compared_with_the_vlas(tmp_path):
    vla = eval_card(tmp_path / "vla", {9: [True] * 4 + [False] * 6})
    trained = {"kind": "trained", "sha256": "12345678", "vla": {"name": "mini"}}
    mine = eval_card(tmp_path / "mine", {9: [True] * 10}, policy=trained)
    short = eval_card(tmp_path / "short", {9: [True] * 12}, policy=trained)
    page = page_of(vla, mine / "card.json", short)
    first, second, third = page.data["evaluations"]
    assert first["baseline"] is None and first["total"]["won"] == 4
    assert second["baseline"] == "VLA mini, l1 head"
    assert second["tasks"][0]["baseline"] == [4, 10]
    assert second["tasks"][0]["p_value"] == pytest.approx(2 / 2**6)
    assert third["baseline"] is None  # it has states that the VLA's card lacks
    assert "Success while training" not in page.text
    # A VLA that a run has trained is a policy like others.
    rl = {"kind": "vla", "vla": {"name": "vla"}, "head": "token", "run": "ppo-seed0"}
    student = eval_card(tmp_path / "student", {9: [True] * 10}, policy=rl)
    for cards in ([student, vla], [vla, student]):
        found = {one["name"]: one for one in page_of(*cards).data["evaluations"]}
        assert found["student"]["policy"] == "ppo-seed0, trained VLA vla, token head"
        assert found["student"]["baseline"] == "VLA mini, l1 head"
        assert found["vla"]["baseline"] is None and found["student"]["colour"] is not None


def test_films_of_cards_and_of_runs_lie_in_the_page(tmp_path):
    vla = eval_card(tmp_path / "vla", {9: [True, False]})
    paired = {"with": str(vla / "card.json"), "policy": {"kind": "expert"}}
    compared = {"wins": 1, "losses": 0, "both": 1, "neither": 0, "p_value": 1.0}
    paired |= {"total": compared, "tasks": [{"suite": "goal", "task_id": 9, **compared}]}
    mine = eval_card(tmp_path / "mine", {9: [True, True]}, paired=paired)
    picture = [np.zeros((64, 96, 3), np.uint8)] * 9
    for place, outcome in ((vla, "failure"), (mine, "success")):
        write_video(place / "films" / f"goal_9_state_01_{outcome}.mp4", picture)
    run = td3_run(tmp_path / "run", [0.5])
    run.videos.mkdir()
    for name in ("vla", "policy"):
        write_video(run.videos / f"task09_state00_{name}.mp4", picture)
    page = page_of(mine, run.path)
    assert [film["alt"] for film in films_of(page)] == ["VLA", "policy", "before", "after"]
    assert "mine: goal 9 state 01" in page.text and "run: task09_state00" in page.text
    assert not films_of(page_of(mine, run.path, films=0))
    (run.videos / "task09_state00_vla.mp4").write_bytes(b"no video")
    with pytest.raises(ConfigError, match="cannot be read as a video"):
        page_of(run.path)


def test_what_runs_call_themselves_is_escaped(tmp_path):
    evil = '<script>alert("x")</script>&<img src=x onerror=y>'
    run = td3_run(tmp_path / "<b>bold & $co$", [0.5], assets=evil)
    page = page_of(run.path, title="</title><script>1</script>")
    names = [name for name, _ in page.elements]
    assert names.count("script") == 1 and "b" not in names and not films_of(page)
    assert evil in page.text and "<b>bold & $co$" in page.text
    assert page.data["groups"][0]["runs"] == ["<b>bold & $co$"]


def test_the_page_needs_no_network_and_runs_nothing(tmp_path):
    text = make_page([grpo_run(tmp_path / "g").path])
    page = Page(text)
    for name, attributes in page.elements:
        assert name not in ("link", "iframe", "object", "a", "base")
        assert not {"src", "href", "onload", "onclick"} & attributes.keys() or name == "img"
        assert name != "img" or (attributes["src"] or "").startswith("data:image/")
        if name == "script":
            assert attributes["type"] == "application/json"
    assert "url(" not in text and "@import" not in text and "http:" not in text
    assert "https:" not in text and "prefers-color-scheme: dark" in text
    metas = [attributes for name, attributes in page.elements if name == "meta"]
    assert any("default-src 'none'" in (meta.get("content") or "") for meta in metas)
    assert any(meta.get("name") == "viewport" for meta in metas)


def _unpaired(run: RunDir) -> None:
    card = json.loads(run.card.read_text())
    del card["results"]["evaluation"]["policy"]["paired"]
    write_json(run.card, card)


def _card(place: str, value: Any) -> Callable[[RunDir], None]:
    return lambda run: spoil(run.card, place, value)


def _only(files: dict[str, str]) -> Callable[[RunDir], None]:
    def spoil(run: RunDir) -> None:
        shutil.rmtree(run.path)
        run.path.mkdir()
        for name, content in files.items():
            (run.path / name).write_text(content)

    return spoil


def _first_line(line: bytes) -> Callable[[RunDir], None]:
    def spoil(run: RunDir) -> None:
        run.metrics.write_bytes(line + b"\n" + run.metrics.read_bytes())

    return spoil


@pytest.mark.parametrize(
    ("spoiling", "expected"),
    [
        (_only({}), "holds no config.json and no card.json"),
        (_only({"card.rows.jsonl": ""}), "has not ended: finish it with vla-gym eval --resume"),
        (_only({"card.json": '{"kind": "rl-token"}'}), "is a card of kind 'rl-token'"),
        (_only({"config.json": '{"model": "gpt"}'}), "is of no trainer that the report knows"),
        (_first_line(b"[1]"), "line 1, is no log of a training: expected `object`, got array [1]"),
        (_first_line(b'{"step": 1, "wall_s": 1, "eval/success": 40}'), "<= 1.0, got 40"),
        (_unpaired, "is damaged: results.evaluation.policy: object missing required field"),
        (_card("config.task_ids", "all"), "card.json is damaged: config"),
        (_card("results.training.success", [["a", 1]]), "card.json is damaged: results"),
        (_card("results.evaluation.policy.tasks", [5]), "card.json is damaged: results"),
        (_card("kind", ["td3"]), "card.json is a card of kind \"['td3']\""),
    ],
)
def test_broken_and_foreign_directories_are_one_error(spoiling, expected, tmp_path, one_error):
    run = td3_run(tmp_path / "run", [0.5, 0.6], results=against_vla())
    spoiling(run)
    out = tmp_path / "page.html"
    error = one_error(cli.main, "report", str(run.path), "--out", str(out))
    assert expected in error and str(run.path) in error and not out.exists()


def test_command_line(tmp_path, capsys, one_error):
    run = td3_run(tmp_path / "a", [0.5])
    out = tmp_path / "new" / "page.html"
    assert cli.main(["report", str(run.path), "--out", str(out)]) == 0
    assert f"report: {out}" in capsys.readouterr().out
    assert Page(out.read_text(encoding="utf-8")).data["groups"]
    mistakes = {
        ("report", str(tmp_path / "nothing")): "does not exist",
        ("report", str(run.path), f"{run.path}/."): "is named twice",
        ("report", str(run.path), "--out", str(tmp_path)): "is a directory",
        ("report", str(run.path), "--out", "page.pdf"): "must end in .html",
        ("report", str(run.path), "--films", "-1"): "--films",
        ("report", str(run.path), "--out", f"{run.card}/page.html"): "cannot be written",
    }
    for arguments, expected in mistakes.items():
        assert expected in one_error(cli.main, *arguments)


def test_names_are_as_short_as_they_can_be():
    paths = [Path("/x/one/card.json"), Path("/x/two")]
    assert short_names(paths) == ["one", "two"]
    assert short_names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]


def test_a_missing_number_is_left_out_of_a_curve(tmp_path):
    run = td3_run(tmp_path / "a", [0.5])
    write_logs(run, [(1, 0.0, {"train/kl": float("nan")}), (2, 1.0, {"train/kl": 0.5})])
    (source,), _ = read_sources([run.path])
    curve = metric(source, "train/kl")
    assert curve is not None and curve.steps.tolist() == [16] and curve.values.tolist() == [0.5]
    assert metric(source, "train/nothing") is None
    assert source.rows[0]["wall_s"] == BEGAN
