"""Files from elsewhere: cards, presets, runs, policies, caches, packs, demonstrations, tasks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import report_runs
import torch
import world_model_toys
import yaml
from engine import Case, Nonsense, command
from gymnasium import spaces
from hostile_data import EDGES, LONG, TEXTS, VALUES, drawn, spoilt
from hypothesis import strategies as st

from vla_gym.assets import resolve_asset_pack
from vla_gym.cli import main as cli
from vla_gym.cli.options import parse_options
from vla_gym.demos.files import join_parts, read_meta, write_part
from vla_gym.rl_token import load_rl_token
from vla_gym.sim import LiberoSim
from vla_gym.suites import get_task
from vla_gym.suites.disk_cache import FILES, MANIFEST, verify
from vla_gym.suites.libero import model as scene_model
from vla_gym.suites.libero.bddl import read_problem
from vla_gym.vla.files import WEIGHTS_ROOT
from vla_gym_trainers.cloning.data import load_demos
from vla_gym_trainers.evaluation.config import EvalConfig
from vla_gym_trainers.evaluation.trained import load_trained
from vla_gym_trainers.explorer.config import ExplorerConfig
from vla_gym_trainers.on_policy.config import GRPOConfig, PPOConfig
from vla_gym_trainers.on_policy.rl_token_actor import RLTokenActor
from vla_gym_trainers.runs.result_card import to_plain
from vla_gym_trainers.runs.run_dir import Checkpoint
from vla_gym_trainers.runs.settings import parse_config, preset_names
from vla_gym_trainers.td3.config import TD3Config, TD3RunConfig
from vla_gym_trainers.td3.policy import RLTokenPolicy
from vla_gym_trainers.world_model.config import WorldModelConfig
from vla_gym_trainers.world_model.model import GRUWorldModel

KINDS = {
    "td3": TD3RunConfig,
    "ppo": PPOConfig,
    "grpo": GRPOConfig,
    "world": WorldModelConfig,
    "explorer": ExplorerConfig,
}
JSON_TEXTS = ["", "[]", "null", "5", "{", "[" * 50_000, '"a"', '{"a": NaN}', "\0", "\ufeff{}"]


def texts(good: str, count: int, seed: int) -> list[str]:
    """Return spoilt forms of a JSON text."""
    return drawn(st.one_of(*[spoilt(good)] * 8, st.sampled_from(JSON_TEXTS)), count, seed)


def copy(folder: Path, to: Path) -> Path:
    """Copy a folder without the checksums of its weights."""
    shutil.copytree(folder, to)
    (to / "SHA256SUMS").unlink(missing_ok=True)
    return to


# Result cards, presets, command lines


def _cards(scratch: Path, count: int, seed: int) -> Iterator[Case]:
    patch = pytest.MonkeyPatch()
    won = {0: [True, False], 1: [True, True]}
    good = (report_runs.eval_card(scratch / "eval", won) / "card.json").read_text()
    results = {"training": {"chunks": 5, "env_steps": 40}, **report_runs.against_vla()}
    run = report_runs.td3_run(scratch / "run", [0.5, 0.6], patch, results=results)
    row = run.metrics.read_text().splitlines()[0]
    group = "result cards and logs"

    def report(folder: Path, *paths: Path) -> None:
        command(cli.main, "report", *map(str, paths), "--out", str(folder / "page.html"))
        if "<script>" in (page := (folder / "page.html").read_text()) and "alert" in page:
            raise Nonsense("a script in the page")

    def of_eval(folder: Path, text: str, merge: bool) -> None:
        bad = folder / "bad.json"
        bad.write_text(text, "utf-8", "surrogatepass")
        if merge:
            command(cli.main, "eval-merge", str(bad), "--partial", "--out", str(folder / "m.json"))
            json.loads((folder / "m.json").read_text())
        else:
            report(folder, bad)

    def of_run(folder: Path, text: str, name: str) -> None:
        bad = copy(scratch / "run", folder / "run")
        (bad / name).write_text(text, "utf-8", "surrogatepass")
        report(folder, bad)

    for merge in (False, True):
        plain = partial(of_eval, text=good, merge=merge)
        yield Case(group, f"as it is, merged: {merge}", plain, "accepted")
    plain = partial(of_run, text=(scratch / "run" / "card.json").read_text(), name="card.json")
    yield Case(group, "a run as it is", plain, "accepted")
    for i, text in enumerate(texts(good, count // 2, seed)):
        yield Case(group, text[:90], partial(of_eval, text=text, merge=bool(i % 2)))
    for name, share in (("card.json", 4), ("config.json", 8)):
        for text in texts((scratch / "run" / name).read_text(), count // share, seed):
            yield Case(group, text[:90], partial(of_run, text=text, name=name))
    for text in texts(row, count // 8, seed):
        yield Case(group, text[:90], partial(of_run, text=text + "\n" + row, name="metrics.jsonl"))


def _parsed(kind: Any, arguments: list[str]) -> None:
    """Read settings as a command does, without the work that follows."""

    def work(rest: Any) -> None:
        config = parse_options(kind, rest, "eval") if kind is EvalConfig else None
        config = config or parse_config(kind, rest)
        if hasattr(config, "check"):
            config.check()
        json.loads(json.dumps(to_plain(config), allow_nan=False))

    command(lambda rest: cli.run_command(work, rest), *arguments)


def _settings(count: int, seed: int) -> Iterator[Case]:
    names = [name for name in preset_names() if name.split("_")[0] in KINDS]
    folder = Path(parse_config.__code__.co_filename).parents[2] / "configs"
    group = "presets and command lines"

    def preset(at: Path, text: str, kind: Any) -> None:
        (at / "mine.yaml").write_text(text, "utf-8", "surrogatepass")
        _parsed(kind, ["--preset", str(at / "mine.yaml")])

    for number, name in enumerate(names):
        values = yaml.safe_load((folder / f"{name}.yaml").read_text())
        for text in texts(json.dumps(values), max(2, count // (3 * len(names))), seed + number):
            run = partial(preset, text=text, kind=KINDS[name.split("_")[0]])
            yield Case(group, f"{name} {text}"[:90], run)
    for number, kind in enumerate([*KINDS.values(), EvalConfig]):
        fields = [f.name.replace("_", "-") for f in dataclasses.fields(kind)]
        fields.remove("progress")
        words = st.one_of(
            st.sampled_from([*map(str, EDGES), *TEXTS, "nan", "inf", "1e400", "-1", "0", "None"]),
            st.text(min_size=1, max_size=5),
        )
        for option, word in drawn(
            st.tuples(st.sampled_from(fields), words), count // 9, seed + number
        ):
            arguments = [f"--{option}", word]
            run = lambda _, k=kind, a=arguments: _parsed(k, a)  # noqa: E731
            yield Case(group, f"{kind.__name__} {arguments}"[:90], run)


# Runs, policies, world models


def td3_policy(path: Path) -> None:
    """Write a small policy of TD3+BC for the VLA mini."""
    box = partial(spaces.Box, -np.inf, np.inf, dtype=np.float32)
    action = spaces.Box(-1.0, 1.0, (8, 7), np.float32)
    observed = spaces.Dict({"rl_token": box((256,)), "vla_action": action, "proprio": box((8,))})
    RLTokenPolicy(observed, action, lambda _: 1e-3, TD3Config(net_arch=(8,))).save(path)


def spoilt_header(content: bytes, change: Callable[[str], str]) -> bytes:
    """Return a safetensors file with another header."""
    size = struct.unpack("<Q", content[:8])[0]
    header = change(content[8 : 8 + size].decode()).encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


def spoilt_tensors(content: bytes, count: int, seed: int) -> list[bytes]:
    """Return safetensors files whose header, length or numbers are others."""
    size = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + size].decode()
    bad = [spoilt_header(content, lambda _, t=t: t) for t in texts(header, count, seed)]
    bad += [content[: len(content) // 2], content[:4], b"", struct.pack("<Q", 2**63) + content[8:]]
    bad += [content[: 8 + size] + b"\xff" * (len(content) - 8 - size)]  # NaN everywhere
    return bad


def _acts(policy: Any) -> None:
    shapes = {key: space.shape for key, space in policy.observation_space.spaces.items()}
    action, _ = policy.predict({k: np.zeros(shape, np.float32) for k, shape in shapes.items()})
    if action.shape != policy.action_space.shape or not np.isfinite(action).all():
        raise Nonsense(f"an action of shape {action.shape}: {action.ravel()[:3]}")


def _runs(scratch: Path, count: int, seed: int) -> Iterator[Case]:
    group = "runs and policies"
    run = scratch / "trained"
    run.mkdir()
    td3_policy(run / "policy.safetensors")
    (run / "config.json").write_text(json.dumps(to_plain(TD3RunConfig(run_dir=run))))
    actor = scratch / "actor"
    actor.mkdir()
    RLTokenActor(256, 8, (8,)).save(actor)

    def loads(at: Path, name: str, content: bytes, source: Path, load: Any) -> None:
        bad = copy(source, at / "bad")
        (bad / name).write_bytes(content)
        load(bad)

    def plays(folder: Path) -> None:
        _acts(load_trained(folder)._model)

    policy = (run / "policy.safetensors").read_bytes()
    yield Case(group, "as it is", lambda _: plays(run), "accepted")
    yield Case(group, "an actor as it is", lambda _: _acts(RLTokenActor.load(actor)), "accepted")
    for content in spoilt_tensors(policy, count // 3, seed):
        load = lambda at: _acts(RLTokenPolicy.load(at / "policy.safetensors"))  # noqa: E731
        case = partial(loads, name="policy.safetensors", content=content, source=run, load=load)
        yield Case(group, f"policy {content[:120]!r}"[:130], case)
    for name, load in (
        ("rl_token_actor.json", lambda at: _acts(RLTokenActor.load(at))),
        ("config.json", plays),
    ):
        source = run if name == "config.json" else actor
        for text in texts((source / name).read_text(), count // 3, seed):
            content = text.encode("utf-8", "surrogatepass")
            case = partial(loads, name=name, content=content, source=source, load=load)
            yield Case(group, f"{name} {text}"[:90], case)
    for spec in ("class:os:system", "class:evil:Run", "class:", LONG, "mini?adapters=/etc", "a\0b"):
        for key in ("vla", "world_model", "rl_token"):
            content = json.dumps({key: spec}).encode()
            case = partial(loads, name="config.json", content=content, source=run, load=plays)
            yield Case(group, f"config.json {key}: {spec[:50]}", case)
    state = json.dumps({"format": 2, "step": 5, "trainer": {"a": 1}, "run": {}})
    for text in texts(state, count // 8, seed):
        content = text.encode("utf-8", "surrogatepass")
        case = partial(loads, name="state.json", content=content, source=run, load=Checkpoint.read)
        yield Case(group, f"state.json {text}"[:90], case)


def _world_models(scratch: Path, count: int, seed: int) -> Iterator[Case]:
    model = world_model_toys.toy_model()
    model.save_pretrained(scratch / "world")
    config = (scratch / "world" / "config.json").read_text()
    (weights,) = (scratch / "world").glob("*.safetensors")

    def loads(at: Path, name: str, content: bytes) -> None:
        bad = copy(scratch / "world", at / "bad")
        (bad / name).write_bytes(content)
        loaded = GRUWorldModel.from_pretrained(bad)
        if not all(value.isfinite().all() for value in loaded.parameters()):
            raise Nonsense("weights that are not finite")
        state = loaded.initial_state(1)
        sizes = loaded.sizes
        frames = np.zeros((1, sizes.image_size, sizes.image_size, 3), np.uint8)
        logits = loaded.logits(state, loaded.tokens(frames), torch.zeros(1, sizes.chunk_len * 7))
        if not logits.isfinite().all():
            raise Nonsense("logits that are not finite")

    plain = partial(loads, name="config.json", content=config.encode())
    yield Case("world models", "as it is", plain, wanted="accepted")
    for text in texts(config, count * 2 // 3, seed):
        run = partial(loads, name="config.json", content=text.encode("utf-8", "surrogatepass"))
        yield Case("world models", text[:90], run)
    for content in spoilt_tensors(weights.read_bytes(), count // 3, seed):
        run = partial(loads, name=weights.name, content=content)
        yield Case("world models", f"{content[:90]!r}", run)


# Caches, packs, demonstrations, tasks


def _scenes(count: int, seed: int) -> Iterator[Case]:
    task = get_task("goal", 8)
    known = scene_model.load_task_model(task, "lite")
    source = known.mjb_path.parent
    group = "cached scenes and packs"

    def manifest(at: Path, text: str) -> None:
        bad = copy(source, at / "scene")
        (bad / MANIFEST).write_text(text, "utf-8", "surrogatepass")
        if verify(bad, known.scene_key):
            same = (
                json.loads(text)["sha256"] == json.loads((source / MANIFEST).read_text())["sha256"]
            )
            if not same:
                raise Nonsense("a manifest with other checksums verifies")

    def scene(at: Path, name: str, content: bytes) -> None:
        bad = copy(source, at / "scene")
        (bad / name).write_bytes(content)
        sums = {n: hashlib.sha256((bad / n).read_bytes()).hexdigest() for n in FILES}
        old = json.loads((bad / MANIFEST).read_text())
        (bad / MANIFEST).write_text(json.dumps({**old, "sha256": sums}))
        scene_model.load_scene = lambda *_: bad  # type: ignore[assignment]
        loaded = scene_model.load_task_model(task, "lite")
        sim = LiberoSim(loaded)
        for layout in (loaded.official_layout(0), loaded.sample_layout(np.random.default_rng(0))):
            sim.reset(layout)
            sim.run_chunk(np.zeros((2, 7)))
            if not np.isfinite(sim.data.qpos).all():
                raise Nonsense("a simulation that is not finite")

    for text in texts((source / MANIFEST).read_text(), count // 4, seed):
        yield Case(group, f"manifest {text}"[:90], partial(manifest, text=text))
    for text in texts((source / "scene.json").read_text(), count // 2, seed):
        run = partial(scene, name="scene.json", content=text.encode("utf-8", "surrogatepass"))
        yield Case(group, f"scene.json {text}"[:90], run)
    for content in (b"", b"PK", (source / "init_states.npz").read_bytes()[:-50]):
        run = partial(scene, name="init_states.npz", content=content)
        yield Case(group, f"init_states.npz {content[:9]!r}", run, wanted="clear")


def _packs(count: int, seed: int) -> Iterator[Case]:
    root = resolve_asset_pack("lite").root

    def pack(at: Path, text: str) -> None:
        bad = copy(root, at / "pack")
        (bad / "lite_pack.json").write_text(text, "utf-8", "surrogatepass")
        found = resolve_asset_pack(bad)
        if not (found.root / "scenes").is_dir():
            raise Nonsense(f"a pack {found}")

    for text in texts((root / "lite_pack.json").read_text(), count, seed):
        yield Case("cached scenes and packs", f"pack {text}"[:90], partial(pack, text=text))


def _demo_file(path: Path) -> None:
    """Write two short episodes of random frames."""
    model = scene_model.load_task_model(get_task("goal", 8), "lite")
    rng, rows = np.random.default_rng(0), 3
    frames = {
        "images": rng.integers(0, 256, (rows, 2, 64, 64, 3), dtype=np.uint8),
        "proprio": rng.normal(size=(rows, 8)).astype(np.float32),
        "actions": np.zeros((rows, 7), np.float32),
        "executed_actions": np.zeros((rows, 7), np.float32),
        "states": np.zeros((rows, 1 + model.nq + model.nv)),
        "joints": np.zeros((rows, 7)),
        "eef_quat": np.zeros((rows, 4)),
    }
    parts = [path.with_name(f"{i}.hdf5") for i in range(2)]
    for part in parts:
        write_part(part, frames, {"init_state_id": 0})
    join_parts(path, parts, model, {"image_size": 64, "pack": "lite"})
    for part in parts:
        part.unlink()


def _demos(scratch: Path, count: int, seed: int) -> Iterator[Case]:
    source = scratch / "demos" / "good_demo.hdf5"
    source.parent.mkdir()
    _demo_file(source)
    places = ["data", "data/demo_0", "data/demo_1/obs", "data/demo_0/actions", "data/demo_0/dones"]
    places += [f"data/demo_0/obs/{name}" for name in ("agentview_rgb", "ee_states", "ee_pos")]
    shapes = st.sampled_from([(), (0,), (3, 7), (3, 8), (2, 7), (3, 2, 2, 3), (3, 64, 64)])
    kinds = st.sampled_from(["u1", "f4", "c8", "S3", "i8", "bool"])
    fills = st.sampled_from([0, 1, np.nan, 200])
    data = st.tuples(st.just("data"), st.sampled_from(places), shapes, kinds, fills)
    names = ["vla_gym", "problem_info", "macros_image_convention", "num_demos"]
    attributes = st.tuples(st.just("attribute"), st.sampled_from(names), VALUES)
    gone = st.tuples(st.just("gone"), st.sampled_from(places))
    more = st.tuples(st.just("more"), st.sampled_from(["demo_x", "demo_", "x", "demo_٣"]))

    def reads(at: Path, how: tuple[Any, ...]) -> None:
        folder = at / "demos"
        bad = copy(source.parent, folder) / "good_demo.hdf5"
        with h5py.File(bad, "a") as file:
            if how[0] == "gone":
                del file[how[1]]
            elif how[0] == "more":
                (file if how[1] == "mask" else file["data"]).create_group(how[1])
            elif how[0] == "attribute":
                value = how[2] if isinstance(how[2], int | float | str) else json.dumps(how[2])
                try:
                    file["data"].attrs[how[1]] = value
                except (TypeError, ValueError, OverflowError):  # HDF5 has no such value
                    file["data"].attrs[how[1]] = b"\xff"
            else:
                _, place, shape, kind, fill = how
                del file[place]
                with np.errstate(all="ignore"):
                    file[place] = np.full(shape, 0 if kind in "u1i8bool" else fill).astype(kind)
        meta = read_meta(bad)
        demos = load_demos(folder, held_out_episodes=1)
        whole = all(np.isfinite(x).all() for x in (demos.proprio, demos.actions))
        if not whole or demos.actions.shape[1:] != (7,) or demos.images.shape[2:] != (64, 64, 3):
            raise Nonsense(f"frames {demos.images.shape}, {demos.actions.shape}, finite: {whole}")
        if not all(isinstance(text, str) and text for text in demos.instructions):
            raise Nonsense(f"instructions {demos.instructions}")
        del meta

    yield Case("demonstrations", "as it is", partial(reads, how=("more", "mask")), "accepted")
    for how in drawn(st.one_of(data, data, attributes, attributes, gone, more), count, seed):
        yield Case("demonstrations", str(how)[:90], partial(reads, how=how))


def _tasks(count: int, seed: int) -> Iterator[Case]:
    good = get_task("goal", 8).bddl_file.read_text()  # type: ignore[attr-defined]
    words = st.sampled_from(["(", ")", "(and", "- ", "\0", "(define", "; ", LONG, "((" * 5000])
    cut = st.integers(0, len(good) - 1)
    changed = st.builds(lambda i, j, w: good[: min(i, j)] + w + good[max(i, j) :], cut, cut, words)

    def reads(at: Path, text: str) -> None:
        file = at / "a.bddl"
        file.write_text(text)
        problem = read_problem(file)
        words = [word for row in problem.goal + problem.init for word in row]
        if not all(isinstance(word, str) for word in words) or not problem.goal:
            raise Nonsense(f"predicates {problem.goal}, {problem.init}")

    for text in drawn(st.one_of(changed, st.sampled_from(JSON_TEXTS)), count, seed):
        yield Case("files of tasks", f"{text[-80:]!r}", partial(reads, text=text))
    for suite in ("goal-nothing", "libero_goal_swap+x", "+", "goal+goal", LONG, "10-lan+90", "\0"):
        run = lambda _, s=suite: command(cli.main, "tasks", "--suite", s)  # noqa: E731
        yield Case("files of tasks", f"suite {suite[:40]!r}", run)


def _rl_tokens(count: int, seed: int) -> Iterator[Case]:
    source = WEIGHTS_ROOT / "mini-rl-token"

    def loads(at: Path, text: str) -> None:
        bad = copy(source, at / "bad")
        (bad / "config.json").write_text(text, "utf-8", "surrogatepass")
        token = load_rl_token(bad)
        if not torch.isfinite(next(iter(token.parameters()))).all():  # type: ignore[union-attr]
            raise Nonsense("weights that are not finite")

    for text in texts((source / "config.json").read_text(), count, seed):
        yield Case("world models", f"RL token {text}"[:90], partial(loads, text=text))


def cases(count: int, seed: int) -> Iterator[Case]:
    """Yield the cases of files, about ``count``."""
    main, folder = os.getpid(), Path(tempfile.mkdtemp(prefix="hostile-good-"))
    try:
        yield from _cards(folder, count // 4, seed)
        yield from _settings(count // 4, seed)
        yield from _runs(folder, count // 8, seed)
        yield from _world_models(folder, count // 12, seed)
        yield from _rl_tokens(count // 24, seed)
        yield from _scenes(count // 8, seed)
        yield from _packs(count // 24, seed)
        yield from _demos(folder, count // 12, seed)
        yield from _tasks(count // 16, seed)
    finally:
        if os.getpid() == main:
            shutil.rmtree(folder, ignore_errors=True)
