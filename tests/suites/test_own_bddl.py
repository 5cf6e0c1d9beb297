"""Tasks of one's own: BDDL files given by path."""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from run_python import ROOT, run_python
from world_model_toys import OneView

import vla_gym  # noqa: F401 - registers the ids
from vla_gym.assets import cache_dir, resolve_asset_pack
from vla_gym.errors import AssetError, CompileError, ConfigError, UnknownTaskError, VlaGymError
from vla_gym.remote.part_env import PartEnv, build
from vla_gym.rollout import Start
from vla_gym.suites import SUITES, VARIANTS, get_suite, get_task, registry, suite_tasks
from vla_gym.suites.disk_cache import load_scene
from vla_gym.suites.libero import TaskModel, load_task_model
from vla_gym.suites.libero import own as own_module
from vla_gym.suites.libero.bddl_checks import WORKSPACES, check_problem, known_objects
from vla_gym.suites.libero.own import MAX_BYTES, own_suite
from vla_gym.suites.libero.requests import scene_request
from vla_gym.suites.libero.tasks import LiberoTask, scene_of
from vla_gym_trainers.evaluation.command import run_eval
from vla_gym_trainers.evaluation.config import EvalConfig
from vla_gym_trainers.evaluation.play import PlayConfig
from vla_gym_trainers.on_policy.config import GRPOConfig
from vla_gym_trainers.rl_token.collect_states import states_of_episodes
from vla_gym_trainers.rl_token.vla_states import StatesConfig
from vla_gym_trainers.runs.settings import load_run_settings
from vla_gym_trainers.td3.config import TD3RunConfig
from vla_gym_trainers.td3.train import train_td3

pytestmark = pytest.mark.timeout(400, func_only=True)  # scenes are compiled
# No task of LIBERO has these things together, this goal or these words.
OWN = """
(define (problem LIBERO_Tabletop_Manipulation)
  (:domain robosuite)
  (:language Put the moka pot on the plate and turn on the stove)
  (:regions
    (pot (:target main_table) (:ranges ((-0.06 0.18 -0.02 0.22))) (:yaw_rotation ((0.0 0.0))))
    (plate (:target main_table) (:ranges ((0.04 -0.02 0.08 0.02))))
    (stove (:target main_table) (:ranges ((-0.42 -0.26 -0.40 -0.24))) (:yaw_rotation ((0.0 0.0))))
  )
  (:fixtures main_table - table  flat_stove_1 - flat_stove)
  (:objects moka_pot_1 - moka_pot  plate_1 - plate)
  (:init
    (On moka_pot_1 main_table_pot) (On plate_1 main_table_plate) (On flat_stove_1 main_table_stove)
  )
  (:goal (And (On moka_pot_1 plate_1) (Turnon flat_stove_1)))
)
"""
GOAL = "(:goal (And (On moka_pot_1 plate_1) (Turnon flat_stove_1)))"


@pytest.fixture(autouse=True)
def _short_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_module, "MAX_CONTROL_STEPS", 24)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pot_and_stove.bddl"
    path.write_text(OWN)
    return path


def edited(old: str, new: str) -> str:
    assert OWN.count(old) == 1, old
    return OWN.replace(old, new)


def test_all_of_liberos_own_files_pass_the_checks() -> None:
    tasks = [task for suite in (*SUITES, *VARIANTS) for task in suite_tasks(suite)]
    kinds = set()
    for task in tasks:
        assert isinstance(task, LiberoTask)
        check_problem(task.problem)
        kinds.add(task.problem.kind)
    assert len(tasks) == 290 and kinds <= set(WORKSPACES)
    assert {"plate", "flat_stove", "white_bottle"} <= set(known_objects())


def test_the_file_in_the_docs_is_one(file: Path) -> None:
    page = (ROOT / "docs" / "environments.md").read_text()
    file.write_text(page.partition("```lisp\n")[2].partition("```")[0])
    (task,) = own_suite(file).tasks
    assert task.goal == "on moka_pot_1 plate_1 and turnon flat_stove_1"


def test_a_file_of_liberos_plays_what_its_suite_plays() -> None:
    suite, task_id = "10", 2
    task = get_task(suite, task_id)
    assert isinstance(task, LiberoTask)
    settings: dict[str, Any] = {"image_size": 64, "gamma": 0.99}
    own = gym.make("Libero-v0", bddl_path=task.bddl_file, **settings)
    theirs = gym.make(f"Libero-{suite}-v0", task_ids=task_id, **settings)
    ours, base = own.unwrapped, theirs.unwrapped
    theirs.action_space.seed(0)
    for seed in (0, 1):
        obs, info = own.reset(seed=seed)
        expected, known = theirs.reset(seed=seed)
        for step in range(20):
            if step:
                action = theirs.action_space.sample()
                obs, *_, info = own.step(action)
                expected, *_, known = theirs.step(action)
            for name in ("agentview", "wrist", "proprio"):
                np.testing.assert_array_equal(obs[name], expected[name])
            for field in ("qpos", "qvel", "qacc_warmstart"):
                mine, his = (getattr(e.sim.data, field) for e in (ours, base))
                np.testing.assert_array_equal(mine, his)
        assert info["instruction"] == task.problem.language
    assert info["bddl_file"] == f"{task.name}.bddl" and "bddl_file" not in known
    goals = [[dataclasses.asdict(p) for p in e.task_model.goal] for e in (ours, base)]
    np.testing.assert_equal(*goals)
    own.close()
    theirs.close()


def test_a_new_task_is_compiled_sampled_and_judged(file: Path) -> None:
    settings: dict[str, Any] = {"cameras": (), "reward": "staged", "variation": "strong"}
    env = gym.make("Libero-v0", bddl_path=file, **settings)
    base = env.unwrapped
    seen = set()
    for seed in range(5):
        _, info = env.reset(seed=seed)
        model: TaskModel = base.task_model
        assert model.clutter
        x, y, _ = base.sim.data.body(model.objects["moka_pot_1"].body).xpos
        assert -0.06 - 0.02 < x < -0.02 + 0.02 and 0.18 - 0.02 < y < 0.22 + 0.02
        seen.add((x, y))
    assert len(seen) == 5
    assert info["instruction"] == "put the moka pot on the plate and turn on the stove"
    assert info["init_state_id"] == -1 and info["bddl_file"] == "pot_and_stove.bddl"
    assert info["progress"] == 0.0

    # By hand: the pot over the plate, then the knob turned.
    def put(pot_over_plate: bool, knob: float) -> tuple[bool, float]:
        state = base.sim.get_state()
        data = base.sim.data
        if pot_over_plate:
            address = model.free_qpos["moka_pot_1"]
            plate = data.body(model.objects["plate_1"].body).xpos
            pot = data.qpos[address : address + 3]
            data.qpos[address : address + 3] = [*plate[:2], pot[2] + 0.03]
        (joint,) = next(p for p in model.goal if p.kind == "joint").joint_qpos
        data.qpos[joint] = knob
        for _ in range(6):
            _, success = base.sim.run_chunk(np.array([[0, 0, 0, 0, 0, 0, -1.0]]))
            if success:
                break
        found = success, base.sim.progress()
        base.sim.set_state(state)
        return found

    on = next(p for p in model.goal if p.kind == "joint")
    assert on.comparison in ("<", "<=", ">", ">=")
    turned = on.threshold + (0.3 if ">" in on.comparison else -0.3)
    assert put(False, 0.0) == (False, 0.0)
    assert put(True, 0.0) == (False, 0.5)
    assert put(False, turned) == (False, 0.5)
    assert put(True, turned) == (True, 1.0)
    env.close()


def test_workers_and_the_vla_are_told_what_the_file_said(tmp_path: Path, file: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    shutil.copy(file, folder / "a.bddl")
    (folder / "b.bddl").write_text(edited("Put the moka pot on", "Move the pot to"))
    envs = gym.make_vec(
        "LiberoVLA-v0", num_envs=2, bddl_path=folder, task_ids=[[0], [1]], workers=1
    )
    for path in folder.iterdir():  # from here on nobody looks at the files
        path.write_text("(edited meanwhile)")
    try:
        obs, infos = envs.reset(seed=0)
        texts = infos["instruction"].tolist()
        assert texts == [
            "put the moka pot on the plate and turn on the stove",
            "move the pot to the plate and turn on the stove",
        ]
        assert infos["bddl_file"].tolist() == ["a.bddl", "b.bddl"]
        assert list(envs._last.instructions) == texts  # what the VLA is told
        obs, *_ = envs.step(obs["vla_action"])
        assert obs["rl_token"].shape == (2, 256) and np.isfinite(obs["rl_token"]).all()
    finally:
        envs.close()


def test_other_processes_find_a_suite_by_name(file: Path) -> None:
    name = own_suite([file]).name
    code = f"from vla_gym.suites import get_task; print(get_task({name!r}, 0).facts['bddl_file'])"
    assert run_python(code).stdout == "pot_and_stove.bddl\n"
    stored = cache_dir() / "bddl" / f"{name}.json"
    get_suite(name)
    registry._loaded.pop(name)
    stored.write_text(json.dumps([["pot_and_stove", edited("(Turnon flat_stove_1)", "")]]))
    with pytest.raises(UnknownTaskError, match="is damaged.*bddl_path"):
        get_suite(name)
    stored.unlink()
    with pytest.raises(UnknownTaskError, match="does not exist.*bddl_path"):
        get_suite(name)
    assert own_suite(file).name == name and get_suite(name).num_init_states == 0


def test_another_machine_gets_the_content(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = own_suite(file)
    make = partial(PartEnv, 2, suite.name, env_ids=range(1), workers=0, cameras=())
    message = pickle.dumps(partial(build, make, (), suite.files))
    file.unlink()
    monkeypatch.setenv("VLA_GYM_CACHE", str(tmp_path / "theirs"))
    registry._loaded.pop(suite.name, None)
    envs, _ = pickle.loads(message)()
    assert [task.facts for task in envs.get_attr("tasks")[0]] == [suite.tasks[0].facts]
    envs.close()


def test_the_cache_key_is_of_the_content(tmp_path: Path, file: Path) -> None:
    def key(path: Path) -> str:
        (task,) = own_suite(path).tasks
        scene, tasks = scene_of(task)
        return scene_request(scene, resolve_asset_pack("lite"), tasks).key()

    first = key(file)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert key(Path(shutil.copy(file, elsewhere))) == first
    file.write_text(edited("0.04 -0.02 0.08 0.02", "0.04 -0.02 0.08 0.03"))
    assert key(file) != first
    # Tasks that differ in goal and words share a scene.
    (elsewhere / "other.bddl").write_text(edited(GOAL, "(:goal (Turnon flat_stove_1))"))
    scenes = {task.scene_name for task in own_suite([file, elsewhere]).tasks}
    assert [task.name for task in own_suite(elsewhere).tasks] == ["other", "pot_and_stove"]
    assert len(scenes) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello world", "expected one expression"),
        ("(define (problem x)", "parentheses do not match"),
        ("(" * 60_000 + ")" * 60_000, "begin with 'define'"),
        ("(define " + "(" * 60_000 + ")" * 60_000 + ")", "no BDDL of LIBERO's kind"),
        (edited(GOAL, ""), "no section ':goal'"),
        (edited(GOAL, "(:goal (And))"), "no goal"),
        (edited(GOAL, GOAL.replace("(And ", "")[:-1]), "several expressions: put .And"),
        (edited(GOAL, f"(:obj_of_interest pot_9) {GOAL}"), "obj_of_interest .*pot_9"),
        (edited(GOAL, GOAL * 2), "section is there twice"),
        (edited("LIBERO_Tabletop", "LIBERO_Moon"), "unknown problem class 'libero_moon_man.*Known"),
        (
            edited("- moka_pot ", "- moka_pots"),
            "unknown object 'moka_pots'. Did you mean 'moka_pot",
        ),
        (edited("(Turnon flat", "(Ignite flat"), "unknown predicate 'ignite'. Known: close, in"),
        (edited("(Turnon flat_stove_1)", "(Turnon flat_stove_2)"), "mean 'flat_stove_1'"),
        (edited("(Turnon flat_stove_1)", "(Turnon flat_stove_1 plate_1)"), "turnon takes 1"),
        (edited("(And (On moka_pot_1 plate_1)", "(And (In moka_pot_1 plate_1)"), "region second"),
        (edited("(On plate_1 main_table_plate)", ""), "plate_1 has no place"),
        (edited("(:language", "(:words"), "no .:language"),
        (edited("main_table - table ", ""), "lacks main_table - table"),
        (edited("((0.04 -0.02 0.08 0.02))", "((0.04 -0.02 0.08))"), "rows of 4 numbers"),
        (edited("((0.04 -0.02 0.08 0.02))", "(1234)"), "rows of 4 numbers, got 1234"),
        (edited("((0.04 -0.02 0.08 0.02))", "((0.08 -0.02 0.04 0.02))"), "ascending"),
        (edited("((0.04 -0.02 0.08 0.02))", "0.04 -0.02 0.08 0.02"), "one value, or one list"),
        (
            edited(
                "(On moka_pot_1 main_table_pot) (On plate_1 main_table_plate)",
                "(On moka_pot_1 plate_1) (On plate_1 moka_pot_1)",
            ),
            "plate_1 needs its place before moka_pot_1",
        ),
        (edited("plate_1 - plate)", "plate_1 - plate moka_pot_1 - plate)"), "the same name"),
        (OWN + " " * MAX_BYTES, "at most 262144"),
    ],
)
def test_what_is_no_task_is_one_error(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"(?s)pot_and_stove.bddl.*{message}"):
        gym.make("Libero-v0", bddl_path=file)


def test_paths_that_lead_nowhere_are_one_error(tmp_path: Path, file: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.bddl").write_bytes(b"\xff\xfe(define)")
    for path, message in (
        (tmp_path / "missing.bddl", "missing.bddl does not exist"),
        ("~nobody-is-called-so/a.bddl", "a.bddl does not exist"),
        ("n" * 300, "nnn.* cannot be read"),
        (tmp_path / "empty", "folder without"),
        (tmp_path / "latin.bddl", "latin.bddl is no text"),
        ([], "0 files"),
        (5, "must be a path"),
        ([file, None], "must be a path"),
    ):
        with pytest.raises(ConfigError, match=message):
            gym.make("Libero-v0", bddl_path=path)


def test_options_that_contradict_each_other_are_one_error(file: Path) -> None:
    makes: tuple[Callable[..., Any], ...] = (gym.make, gym.make_vec)
    for make in makes:
        for env_id in ("Libero-goal-v0", "LiberoVLA-goal-v0"):
            with pytest.raises(ConfigError, match="suite='goal' and bddl_path=.*contradict"):
                make(env_id, bddl_path=file)
        with pytest.raises(ConfigError, match="Give suite="):
            make("Libero-v0")
    for config in (PlayConfig, EvalConfig):
        suite: Any = "goal" if config is PlayConfig else ("goal",)
        with pytest.raises(ConfigError, match="contradict"):
            config(suite=suite, bddl_path=(file,))


def test_there_are_no_official_states(file: Path) -> None:
    for states in ("official", [0]):
        with pytest.raises(ConfigError, match="no official initial states"):
            gym.make("Libero-v0", bddl_path=file, init_states=states)
    with pytest.raises(ConfigError, match="no official initial states"):
        PlayConfig(bddl_path=(file,), init_state_ids=(0,), policy="random").check()
    with pytest.raises(ConfigError, match="official states"):
        EvalConfig(bddl_path=(file,), protocol="openvla").check()
    with pytest.raises(UnknownTaskError, match="No expert for task 0"):
        PlayConfig(bddl_path=(file,)).check()
    file.write_text(edited("- moka_pot ", "- white_bottle "))
    with pytest.raises(AssetError, match="pot_and_stove.bddl needs white_bottle.*assets='libero'"):
        load_task_model(own_suite(file).tasks[0], "lite")


def test_what_only_liberos_classes_know_is_one_line(file: Path) -> None:
    file.write_text(edited("(Turnon flat_stove_1)", "(Open flat_stove_1)"))
    env = gym.make("Libero-v0", bddl_path=file, cameras=())
    with pytest.raises(CompileError, match="stove.bddl: .*upstream has no rule for") as caught:
        env.reset(seed=0)
    assert "\n" not in str(caught.value)


def test_nothing_in_a_file_is_executed(tmp_path: Path, file: Path) -> None:
    # LIBERO's reader evaluates the numbers of a yaw_rotation; itertools is a name that it knows.
    evil = OWN.replace("((0.0 0.0))", "((itertools 0.0))", 1)
    file.write_text(evil)
    with pytest.raises(ConfigError, match="pot_and_stove.bddl.*rows of 2 numbers"):
        gym.make("Libero-v0", bddl_path=file)
    # Nor would the compile process, had the check let it pass.
    task = LiberoTask("bddl-0", 0, "evil", "", 1, "evil", evil)
    request = scene_request("evil", resolve_asset_pack("lite"), (task,))
    with pytest.raises(CompileError, match="could not convert string to float: 'itertools'"):
        load_scene(request, tmp_path)


def test_eval_names_file_and_digest(tmp_path: Path, file: Path) -> None:
    config = EvalConfig(
        bddl_path=(file,),
        policy="random",
        episodes=2,
        num_envs=2,
        workers=0,
        progress=False,
        out=tmp_path / "out",
    )
    card = run_eval(dataclasses.replace(config, seed=1))
    (facts,) = card["protocol"]["files"].values()
    assert facts == own_suite(file).tasks[0].facts and len(facts["bddl_sha256"]) == 64
    rows = card["results"]["episodes"]
    assert [row["init_state_id"] for row in rows] == [-1, -1]
    assert rows[1]["seed"] == rows[0]["seed"] + 1 >= 2_000_000_000
    assert card["results"]["tasks"][0]["instruction"].startswith("put the moka pot")
    again = run_eval(dataclasses.replace(config, seed=1, resume=True))
    assert again["results"] == card["results"]
    starts = PlayConfig(bddl_path=(file,), policy="random").starts()
    assert [(start.task_id, start.init_state_id, start.seed) for start in starts] == [(0, -1, 0)]
    assert starts[0].label() == f"{file.name} seed 0" != str(starts[0])
    assert Start("goal", 3, 5).label() == str(Start("goal", 3, 5)) == "goal 3 state 5"
    with pytest.raises(VlaGymError, match="does not exist"):
        PlayConfig(bddl_path=(tmp_path / "nope.bddl",))


def test_td3_trains_on_files_and_goes_on(tmp_path: Path, file: Path) -> None:
    config = TD3RunConfig(
        bddl_path=(file,),
        total_timesteps=6,
        learning_starts=2,
        critic_warmup_steps=1,
        batch_size=2,
        train_freq=2,
        eval_states=1,
        workers=0,
        run_dir=tmp_path / "run",
        progress=False,
    )
    assert (config.suite, config.task_ids) == (own_suite(file).name, (0,))
    run = train_td3(config)
    card = json.loads((run.run_dir / "card.json").read_text())
    (row,) = card["results"]["evaluation"]["policy"]["episodes"]
    assert (row["suite"], row["seed"]) == (config.suite, 2_000_000_000)
    file.unlink()  # the run has its suite by now
    more = load_run_settings(run.run_dir, TD3RunConfig)
    more = dataclasses.replace(more, total_timesteps=8, eval_states=0)
    assert train_td3(more).card["results"]["training"]["chunks"] == 8


def test_the_rl_tokens_states_are_played_from_files(file: Path) -> None:
    values: dict[str, Any] = {"rollout_episodes": 1, "assets": "lite", "progress": False}
    config = StatesConfig(bddl_path=(file,), expert_episodes=0, **values)
    config.check()
    states = states_of_episodes(OneView(), config)
    assert states.tasks == [f"{own_suite(file).name}_0"] and len(states) == 24 // 8
    assert np.isnan(states.object_pos).all()  # the file does not say what the task is about


def test_tasks_of_a_trainer_are_those_of_its_files(file: Path) -> None:
    config = GRPOConfig(bddl_path=(file,), num_envs=8, eval_states=60)
    assert config.bddl_path is None and config.tasks() == (0,)
    assert [start.seed for start in config.final_starts(None)] == [
        2_000_000_000 + k for k in range(50)
    ]
    assert TD3RunConfig().task_ids == (9,) and len(TD3RunConfig().final_starts(None)) == 50
    with pytest.raises(ConfigError, match="videos must be at most 50, got 51"):
        TD3RunConfig(videos=51)
