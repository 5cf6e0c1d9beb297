"""Files from elsewhere: cards, presets, runs, policies, caches, packs, demonstrations, tasks."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import report_runs
import torch
import world_model_toys
import yaml
from engine import Case, Nonsense, command
from hostile_data import EDGES, LONG, TEXTS, VALUES, drawn, spoilt
from hypothesis import strategies as st
from td3_toys import save_policy
from vla_checkpoints import copied

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
from vla_gym_trainers.on_policy.rl_token_actor import ActorSizes, RLTokenActor
from vla_gym_trainers.runs.result_card import to_plain
from vla_gym_trainers.runs.run_dir import Checkpoint
from vla_gym_trainers.runs.settings import parse_config, preset_names
from vla_gym_trainers.td3.config import TD3RunConfig
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


def damaged(
    group: str,
    source: Path,
    name: str,
    contents: Iterable[str | bytes],
    read: Callable[[Path], Any],
    wanted: str = "",
) -> Iterator[Case]:
    """Yield a case for each content of a file: ``read`` is given a copy of its folder with that."""

    def run(at: Path, content: str | bytes) -> None:
        bad = copied(source, at / "bad")
        raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        (bad / name).write_bytes(raw)
        read(bad)

    for content in contents:
        title = f"{source.name} {name} {content!r}"[:120]
        yield Case(group, title, partial(run, content=content), wanted)


def spoilt_json(
    group: str, source: Path, name: str, count: int, seed: int, read: Callable[[Path], Any]
) -> Iterator[Case]:
    """Yield cases of a file whose JSON is spoilt; see :func:`damaged`."""
    yield from damaged(group, source, name, texts((source / name).read_text(), count, seed), read)


# Result cards, presets, command lines


def _cards(scratch: Path, count: int, seed: int) -> Iterator[Case]:
    group = "result cards and logs"
    card = report_runs.eval_card(scratch / "eval", {0: [True, False], 1: [True, True]})
    results = {"training": {"chunks": 5, "env_steps": 40}, **report_runs.against_vla()}
    trained = report_runs.td3_run(scratch / "run", [0.5, 0.6], results=results)
    row = trained.metrics.read_text().splitlines()[0]

    def report(bad: Path) -> None:
        out = bad.with_name("page.html")
        command(cli.main, "report", str(bad), "--out", str(out))
        if "<script>" in (page := out.read_text()) and "alert" in page:
            raise Nonsense("a script in the page")

    def merge(bad: Path) -> None:
        out, file = bad.with_name("merged.json"), str(bad / "card.json")
        command(cli.main, "eval-merge", file, "--partial", "--out", str(out))
        json.loads(out.read_text())

    readers = (card, report), (card, merge), (trained.path, report)
    for number, (source, read) in enumerate(readers):
        good = (source / "card.json").read_text()
        yield from damaged(group, source, "card.json", [good], read, "accepted")
        yield from spoilt_json(group, source, "card.json", count // 4, seed + number, read)
    yield from spoilt_json(group, trained.path, "config.json", count // 8, seed, report)
    logs = [f"{text}\n{row}" for text in texts(row, count // 8, seed)]
    yield from damaged(group, trained.path, "metrics.jsonl", logs, report)


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
    save_policy(run)
    (run / "config.json").write_text(json.dumps(to_plain(TD3RunConfig(run_dir=run))))
    actor = scratch / "actor"
    actor.mkdir()
    RLTokenActor(ActorSizes(256, 8, [8], 1.0, 2, 8, [1.0] * 7)).save(actor)

    def plays(folder: Path) -> None:
        _acts(load_trained(folder)._model)

    def of_policy(folder: Path) -> None:
        _acts(RLTokenPolicy.load(folder / "policy.safetensors"))

    def of_actor(folder: Path) -> None:
        _acts(RLTokenActor.load(folder))

    yield Case(group, "as it is", lambda _: plays(run), "accepted")
    yield Case(group, "an actor as it is", lambda _: of_actor(actor), "accepted")
    tensors = spoilt_tensors((run / "policy.safetensors").read_bytes(), count // 3, seed)
    yield from damaged(group, run, "policy.safetensors", tensors, of_policy)
    yield from spoilt_json(group, actor, "rl_token_actor.json", count // 3, seed, of_actor)
    yield from spoilt_json(group, run, "config.json", count // 3, seed, plays)
    for spec in ("class:os:system", "class:evil:Run", "class:", LONG, "mini?adapters=/etc", "a\0b"):
        configs = [json.dumps({key: spec}) for key in ("vla", "world_model", "rl_token")]
        yield from damaged(group, run, "config.json", configs, plays)
    state = json.dumps({"format": 2, "step": 5, "trainer": {"a": 1}, "run": {}})
    states = texts(state, count // 8, seed)
    yield from damaged(group, run, "state.json", states, Checkpoint.read)


def _world_models(scratch: Path, count: int, seed: int) -> Iterator[Case]:
    group, good = "world models", scratch / "world"
    world_model_toys.toy_model().save_pretrained(good)
    config = (good / "config.json").read_text()
    (weights,) = good.glob("*.safetensors")

    def loads(bad: Path) -> None:
        loaded = GRUWorldModel.from_pretrained(bad)
        if not all(value.isfinite().all() for value in loaded.parameters()):
            raise Nonsense("weights that are not finite")
        state = loaded.initial_state(1)
        sizes = loaded.sizes
        frames = np.zeros((1, sizes.image_size, sizes.image_size, 3), np.uint8)
        logits = loaded.logits(state, loaded.tokens(frames), torch.zeros(1, sizes.chunk_len * 7))
        if not logits.isfinite().all():
            raise Nonsense("logits that are not finite")

    yield from damaged(group, good, "config.json", [config], loads, "accepted")
    yield from spoilt_json(group, good, "config.json", count * 2 // 3, seed, loads)
    tensors = spoilt_tensors(weights.read_bytes(), count // 3, seed)
    yield from damaged(group, good, weights.name, tensors, loads)


# Caches, packs, demonstrations, tasks


def _scenes(count: int, seed: int) -> Iterator[Case]:
    task = get_task("goal", 8)
    known = scene_model.load_task_model(task, "lite")
    source = known.mjb_path.parent
    group = "cached scenes and packs"

    def sums_of(folder: Path) -> Any:
        return json.loads((folder / MANIFEST).read_text())["sha256"]

    def manifest(bad: Path) -> None:
        if verify(bad, known.scene_key) and sums_of(bad) != sums_of(source):
            raise Nonsense("a manifest with other checksums verifies")

    def scene(bad: Path) -> None:
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

    yield from spoilt_json(group, source, MANIFEST, count // 4, seed, manifest)
    yield from spoilt_json(group, source, "scene.json", count // 2, seed, scene)


def _packs(count: int, seed: int) -> Iterator[Case]:
    root = resolve_asset_pack("lite").root

    def pack(bad: Path) -> None:
        found = resolve_asset_pack(bad)
        if not (found.root / "scenes").is_dir():
            raise Nonsense(f"a pack {found}")

    yield from spoilt_json("cached scenes and packs", root, "lite_pack.json", count, seed, pack)


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
        bad = copied(source.parent, folder) / "good_demo.hdf5"
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
        read_meta(bad)
        demos = load_demos(folder, held_out_episodes=1)
        whole = all(np.isfinite(x).all() for x in (demos.proprio, demos.actions))
        if not whole or demos.actions.shape[1:] != (7,) or demos.images.shape[2:] != (64, 64, 3):
            raise Nonsense(f"frames {demos.images.shape}, {demos.actions.shape}, finite: {whole}")
        if not all(isinstance(text, str) and text for text in demos.instructions):
            raise Nonsense(f"instructions {demos.instructions}")

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

    def loads(bad: Path) -> None:
        token = load_rl_token(bad)
        if not torch.isfinite(next(iter(token.parameters()))).all():  # type: ignore[union-attr]
            raise Nonsense("weights that are not finite")

    yield from spoilt_json("world models", source, "config.json", count, seed, loads)


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
