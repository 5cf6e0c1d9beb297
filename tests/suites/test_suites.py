"""The task table: LIBERO's names, order, instructions, scenes; the BDDL reader; the listing."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from collections import defaultdict
from pathlib import Path

import gymnasium as gym
import pytest
from run_python import run_python

import vla_gym  # noqa: F401 - registers the environments
from vla_gym.cli import main as cli
from vla_gym.envs.base import LiberoEnvBase
from vla_gym.errors import AssetError, UnknownTaskError
from vla_gym.suites import SUITES, VARIANTS, get_suite, get_task, suite_tasks
from vla_gym.suites.libero import load_task_model, own
from vla_gym.suites.libero.bddl import read_problem
from vla_gym.suites.libero.tasks import MAX_CONTROL_STEPS, libero_data_root, scene_of

TASKS = [task for suite in SUITES for task in suite_tasks(suite)]
VARIANT_TASKS = [task for suite in VARIANTS for task in suite_tasks(suite)]


def upstream_tree(name: str) -> ast.Module:
    return ast.parse((libero_data_root() / "benchmark" / name).read_text(encoding="utf-8"))


def test_names_and_order_are_the_benchmarks() -> None:
    # Results are filed under these ids: they must not move with a version of the libero package.
    text = "\n".join(f"{task.key} {task.name}" for task in TASKS)
    digest = "c1c97e28cca22a8580912c09bc7f83f4d767d62b40bb534ab54fc6d90ff0a824"
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    assert get_task("goal", 8).name == "put_the_bowl_on_the_plate"
    orders = next(
        ast.literal_eval(node.value)
        for node in upstream_tree("__init__.py").body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "task_orders"
    )
    assert orders[0] == list(range(10))  # the one that fixes the ids here


def test_instructions_are_upstreams() -> None:
    functions = [n for n in upstream_tree("__init__.py").body if isinstance(n, ast.FunctionDef)]
    source = [node for node in functions if node.name == "grab_language_from_filename"]
    names: dict = {}
    exec(compile(ast.Module(source, []), "upstream", "exec"), names)
    for task in TASKS:
        assert task.instruction == names["grab_language_from_filename"](f"{task.name}.bddl")
    assert get_task("10", 2).instruction == "turn on the stove and put the moka pot on it"


def test_files_and_limits() -> None:
    assert len(TASKS) == 130 and list(SUITES) == ["goal", "spatial", "object", "10", "90"]
    assert [MAX_CONTROL_STEPS[suite] for suite in SUITES] == [300, 220, 280, 520, 400]
    assert own.MAX_CONTROL_STEPS == 520  # of BDDL files of one's own
    for task in TASKS:
        assert task.bddl_file.is_file() and task.init_states_file.is_file()
        assert task.max_control_steps == MAX_CONTROL_STEPS[task.suite]
        assert get_task(f"libero_{task.suite}", task.task_id) == task
        assert len(task.objects) >= 1 and task.goal
    with pytest.raises(UnknownTaskError, match="expected one of goal, spatial, object, 10, 90"):
        get_task("libero_100", 0)
    with pytest.raises(UnknownTaskError, match=r"expected 0\.\.89"):
        get_task("90", 90)


def test_tasks_share_a_scene_when_their_files_describe_the_same_one() -> None:
    scenes: dict[bool, set[str]] = {}
    for is_variant, tasks, count in ((False, TASKS, 32), (True, VARIANT_TASKS, 51)):
        by_name, by_content = defaultdict(set), defaultdict(set)
        for task in tasks:
            by_name[task.scene_name].add(task)
            by_content[task.problem.scene].add(task)
        groups = [{frozenset(t) for t in by.values()} for by in (by_name, by_content)]
        assert groups[0] == groups[1] and len(by_name) == count
        for task in tasks:
            name, together = scene_of(task)
            assert name == task.scene_name and {*together} == by_name[name]
        scenes[is_variant] = set(by_name)
    assert not scenes[False] & scenes[True]
    assert get_task("10", 0).scene_name == get_task("90", 50).scene_name == "living_room_scene2"
    names = [get_task(suite, 3).scene_name for suite in ("goal", "object", "goal-task")]
    assert names == ["goal", "object_3", "goal-swap_0"]


def test_the_scenes_of_ten_tasks_are_all_kept_open() -> None:
    kept = inspect.signature(LiberoEnvBase).parameters["scene_cache_size"].default
    counts = {s: len({task.scene_name for task in suite_tasks(s)}) for s in SUITES}
    assert counts == {"goal": 1, "spatial": 1, "object": 10, "10": 9, "90": 20}
    assert max(count for suite, count in counts.items() if suite != "90") <= kept


def test_variants_are_tasks_of_their_suite_with_one_thing_changed() -> None:
    assert len(VARIANT_TASKS) == 160
    for task in VARIANT_TASKS:
        suite, _, variant = task.suite.partition("-")
        base = get_task(suite, task.task_id)
        assert task.name == base.name and task.max_control_steps == base.max_control_steps
        new_words = task.instruction != base.instruction
        changed = [
            what
            for what in ("objects", "fixtures", "init", "goal", "scene")
            if getattr(task.problem, what) != getattr(base.problem, what)
        ]
        if variant == "object":  # the goal names the other object
            assert "scene" in changed and not new_words
        else:
            assert changed == {"swap": ["init"], "lan": [], "task": ["goal"]}[variant]
            assert new_words == (variant != "swap")
    assert get_task("goal-task", 7).goal == "turnoff flat_stove_1"
    assert get_task("10-lan", 8).instruction == "place both moka pots on stove"


def test_tasks_of_a_scene_place_the_same_fixtures() -> None:
    placed = defaultdict(set)
    for task in (*TASKS, *VARIANT_TASKS):
        names = {args[0] for predicate, *args in task.problem.init if predicate in ("on", "in")}
        placed[task.scene_name].add(frozenset(names & set(task.fixtures)))
    assert {len(kinds) for kinds in placed.values()} == {1}


def test_unknown_variants_and_objects_are_one_clear_error() -> None:
    plain = get_suite("goal-swap")
    assert get_suite("libero_goal_swap") is plain is get_suite("goal-swap")
    with pytest.raises(
        UnknownTaskError, match=r"Unknown suite 'goal-foo'.* goal-swap, goal-object"
    ):
        get_suite("goal-foo")
    with pytest.raises(gym.error.NameNotFound, match="Libero-goal-foo"):
        gym.make("Libero-goal-foo-v0")
    with pytest.raises(AssetError, match=r"needs bigger_akita_black_bowl, yellow_stove.*'libero'"):
        load_task_model(get_task("goal-object", 1), "lite")


def test_goal_text_and_objects() -> None:
    task = get_task("10", 8)
    assert task.goal == (
        "on moka_pot_1 flat_stove_1_cook_region and on moka_pot_2 flat_stove_1_cook_region "
        "and turnon flat_stove_1"
    )
    assert task.objects == ("moka_pot_1", "moka_pot_2")
    assert dict(task.problem.fixtures)["flat_stove_1"] == "flat_stove"
    assert ("turnon", "flat_stove_1") in task.problem.init


@pytest.mark.parametrize(
    "text",
    ["", "(define (problem a", "(define (problem a)) extra", "(other (problem a))", "(define)"],
)
def test_a_damaged_bddl_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "task.bddl"
    path.write_text(text)
    with pytest.raises(UnknownTaskError, match=r"task\.bddl cannot be read as a LIBERO task"):
        read_problem(path)
    with pytest.raises(UnknownTaskError, match="FileNotFoundError"):
        read_problem(tmp_path / "absent.bddl")


def test_every_suite_is_registered() -> None:
    for suite in (*SUITES, *VARIANTS):
        for kind in ("Libero", "LiberoVLA"):
            assert gym.spec(f"{kind}-{suite}-v0").kwargs["suite"] == suite


def test_a_combined_suite_checks_the_assets_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(type(get_suite("goal")), "check_assets", lambda *args: asked.append(args))
    task = get_task("goal+spatial", 13)
    get_suite("goal+spatial").check_assets(task, "lite")
    assert asked == [(get_suite("spatial"), task, "lite")]


def test_the_listing_is_complete_and_neither_it_nor_a_task_imports_anything_heavy() -> None:
    load_task_model(get_task("goal", 0))  # compiles it, if nobody has
    code = """
import sys
from vla_gym.cli import main as cli
from vla_gym.suites import get_task
from vla_gym.suites.libero import load_task_model
cli.main(["tasks", "--json"])
load_task_model(get_task("goal", 0)).official_layout(3)
heavy = {"libero", "robosuite", "mujoco", "torch"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    rows = json.loads(run_python(code).stdout)
    assert [(row["suite"], row["task_id"]) for row in rows] == [(t.suite, t.task_id) for t in TASKS]
    assert {"instruction", "objects", "goal", "max_control_steps"} <= set(rows[0])


def test_the_table_shows_whole_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tasks", "--suite", "spatial"]) == 0
    text = capsys.readouterr().out
    for task in suite_tasks("spatial"):
        assert f" {task.task_id} " in text
    for word in ("instruction", "objects", "goal", "step limit", "220"):
        assert word in text
    assert "…" not in text
