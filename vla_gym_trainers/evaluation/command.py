"""``vla-gym eval`` from start to end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vla_gym.errors import ConfigError, UnknownTaskError, WeightsError
from vla_gym.rollout import Episode, ExpertPolicy, Policy, RandomPolicy, Start, play
from vla_gym.rollout.vla_policy import VLAPolicy
from vla_gym.rollout.workers import WatchGoals
from vla_gym_trainers.evaluation.cards import (
    KIND,
    SCHEMA,
    EvalCard,
    RowsFile,
    card_path,
    check_comparable,
    check_out,
    check_same,
    films_folder,
    read_card,
    results_of,
    world_of,
)
from vla_gym_trainers.evaluation.config import POLICIES, EvalConfig
from vla_gym_trainers.evaluation.episodes import all_starts, parse_shard, shard
from vla_gym_trainers.evaluation.summary import can_be_confused
from vla_gym_trainers.evaluation.tables import print_card
from vla_gym_trainers.evaluation.trained import load_trained
from vla_gym_trainers.evaluation.trained_on import trained_on, trained_vla
from vla_gym_trainers.runs.result_card import (
    machine_facts,
    make_card,
    software_versions,
    to_plain,
    write_json,
)
from vla_gym_trainers.runs.torch_threads import torch_threads

EXIT_INTERRUPTED = 130


def main(config: EvalConfig) -> int:
    """Evaluate, print tables and files; return the exit status."""
    try:
        card = run_eval(config)
    except KeyboardInterrupt:
        advice = "" if config.out is None else " Go on with the same command and --resume."
        sys.stderr.write(f"\nStopped.{advice}\n")
        return EXIT_INTERRUPTED
    print_card(card)
    restarts = card["environment"]["worker_restarts"]
    if restarts:
        sys.stdout.write(f"{restarts} episodes were played again: their worker had died.\n")
    if config.out is not None:
        if films := card.get("films"):
            sys.stdout.write(f"films: {len(films)} files in {films_folder(config.out)}\n")
        sys.stdout.write(f"result card: {card_path(config.out)}\n")
    return 0


def run_eval(config: EvalConfig) -> dict[str, Any]:
    """Evaluate as configured; write the card and the films if ``config.out`` says where.

    Returns:
        The card.

    Raises:
        VlaGymError: If an option is wrong or something cannot be loaded; nothing was played then.
    """
    config.check()
    starts = all_starts(config.suite, config.task_ids, config.episodes or config.num_states())
    part, parts = parse_shard(config.shards)
    mine = shard(starts, part, parts)
    if not mine:
        raise ConfigError(f"--shards {config.shards}: there are only {len(starts)} episodes.")
    _check_tasks(config, starts)
    other = None if config.paired is None else read_card(config.paired)
    if config.out is not None:
        check_out(config.out, resume=config.resume)
    with _torch_threads(config):
        policy = make_policy(config)
        protocol, assets = make_protocol(config, policy, starts)
        if other is not None:
            check_comparable(protocol, other)
            _check_paired(mine, other)
        settings: dict[str, Any] = {
            "assets": assets,
            "physics": config.physics,
            "env_wrappers": [WatchGoals] if config.confusion else [],
        }
        header = {
            "kind": "eval-rows",
            "shard": [part, parts],
            "protocol": protocol,
            "versions": software_versions(),
        }
        rows = None if config.out is None else RowsFile(card_path(config.out), header)
        episodes, seconds, facts = _play(config, policy, settings, mine, rows, header)
        card = make_card(
            KIND,
            config=config,
            seeds={"policy": protocol["policy"].get("seed")},
            environment={**world_of(protocol), **facts, **machine_facts()},
            results=results_of(episodes, protocol, other),
        )
        card |= {
            "schema": SCHEMA,
            "protocol": protocol,
            "shard": [part, parts],
            "wall_seconds": round(seconds, 2),
        }
        if config.out is not None:
            # Before the films: what was counted must not be lost with them.
            write_json(card_path(config.out), card)
            assert rows is not None
            rows.remove()
            if config.films:
                card["films"] = _films(config, policy, settings, episodes)
                write_json(card_path(config.out), card)
    plain: dict[str, Any] = to_plain(card)
    return plain


def make_policy(config: EvalConfig) -> Policy:
    """Load who acts.

    Raises:
        WeightsError: If there is no such policy, or a file is damaged.
        ConfigError: If the parts do not fit each other.
    """
    if config.policy == "expert":
        return ExpertPolicy(config.chunk_len or 8)
    if config.policy == "random":
        return RandomPolicy(config.seed, config.chunk_len or 8)
    if config.policy == "vla":
        return VLAPolicy(
            config.vla or "mini",
            head=config.head,
            temperature=config.temperature,
            seed=config.seed,
            chunk_len=config.chunk_len,
            batch_size=config.batch_size,
            phrasing=config.phrasing,
            device=config.device,
        )
    path = Path(config.policy).expanduser()
    if not path.exists():
        raise WeightsError(
            f"--policy {config.policy}: expected {', '.join(POLICIES)}, a run directory of "
            "vla-gym-train or a .zip of its td3; there is no such file."
        )
    if (tokens := _trained_on_tokens(path, config)) is not None:
        return tokens
    policy = load_trained(
        path, config.vla, config.batch_size, rl_token=config.rl_token, device=config.device
    )
    if config.chunk_len not in (None, policy.chunk_len):
        raise ConfigError(
            f"--chunk-len {config.chunk_len}: the policy acts in chunks of {policy.chunk_len}; "
            "leave it out."
        )
    return policy


def _trained_on_tokens(path: Path, config: EvalConfig) -> VLAPolicy | None:
    """Return the VLA that PPO or GRPO has trained, if it is a run of theirs."""
    vla = None
    if path.is_dir() and not (path / "policy.zip").is_file():
        vla = trained_vla(path, config.vla or trained_on(path).vla)
    if vla is None:
        return None
    policy = VLAPolicy(
        vla,
        head="token",
        chunk_len=config.chunk_len,
        batch_size=config.batch_size,
        device=config.device,
        allow_class=config.vla is not None,
    )
    policy.name = path.name
    return policy


def make_protocol(
    config: EvalConfig, policy: Policy, starts: Sequence[Start]
) -> tuple[dict[str, Any], str]:
    """Return all that the results depend on but for versions, and the pack to play with.

    Raises:
        AssetError: If the asset pack is missing.
    """
    from vla_gym.assets import resolve_asset_pack

    pack = resolve_asset_pack(config.assets)
    tasks: dict[str, list[int]] = {}
    for start in starts:
        ids = tasks.setdefault(start.suite, [])
        if start.task_id not in ids:
            ids.append(start.task_id)
    sees = bool(policy.cameras)
    protocol = {
        "policy": policy.identity,
        "tasks": tasks,
        "episodes": config.episodes or config.num_states(),
        "chunk_len": None if policy.expert else policy.chunk_len,
        "batch_size": config.batch_size if sees else None,
        "torch_threads": config.torch_threads if sees else None,
        **({"device": config.device} if sees and config.device != "cpu" else {}),
        "assets": {"name": pack.name, "digest": pack.digest},
        "physics": config.physics,
        "confusion": config.confusion,
    }
    plain: dict[str, Any] = to_plain(protocol)
    return plain, pack.name if config.assets == "auto" else config.assets


def _check_tasks(config: EvalConfig, starts: Sequence[Start]) -> None:
    suites = dict.fromkeys(start.suite for start in starts)
    if config.confusion and not any(can_be_confused(suite) for suite in suites):
        raise ConfigError(
            f"--confusion needs a suite whose tasks share a scene and differ in their goals, such "
            f"as goal; got {', '.join(suites)}."
        )
    if config.policy == "expert":
        check_expert(starts)


def check_expert(starts: Sequence[Start]) -> None:
    """Check that a scripted expert can play.

    Raises:
        UnknownTaskError: If a task has none.
    """
    from vla_gym.experts import EXPERT_TASKS

    for suite, task_id in dict.fromkeys((start.suite, start.task_id) for start in starts):
        if task_id not in EXPERT_TASKS.get(suite, ()):
            raise UnknownTaskError(
                f"No expert for task {task_id} of suite {suite!r}: see 'vla-gym tasks', or let "
                "another policy act."
            )


def _check_paired(mine: Sequence[Start], other: EvalCard) -> None:
    """Raise before anything is played if the other card lacks a state."""
    theirs = {episode.start for episode in other.episodes}
    missing = [start for start in mine if start not in theirs]
    if missing:
        raise ConfigError(
            f"--paired {other.path} lacks {len(missing)} of {len(mine)} episodes ({missing[0]}, "
            "...): play both policies on the same suites, tasks and --episodes."
        )


def _torch_threads(config: EvalConfig) -> AbstractContextManager[None]:
    if config.policy in ("expert", "random"):  # torch is not needed
        return nullcontext()
    return torch_threads(config.torch_threads)


def _play(
    config: EvalConfig,
    policy: Policy,
    settings: dict[str, Any],
    starts: Sequence[Start],
    rows: RowsFile | None,
    header: dict[str, Any],
) -> tuple[list[Episode], float, dict[str, Any]]:
    """Play what is left to play; return all episodes, the seconds they took, and facts."""
    episodes, before, facts = _earlier(config, rows, header)
    known = {episode.start for episode in episodes}
    left = [start for start in starts if start not in known]
    if rows is not None and left and not rows.path.exists():
        rows.begin()
    started = time.perf_counter()
    won = sum(episode.success for episode in episodes)
    size: dict[str, Any] = {"num_envs": config.num_envs, "workers": config.workers}
    with tqdm(
        total=len(starts),
        initial=len(episodes),
        desc=policy.name,
        unit="episode",
        disable=not config.progress,
    ) as bar:
        for episode in play(policy, left, facts=facts, **size, **settings):
            episodes.append(episode)
            won += episode.success
            facts["worker_restarts"] += episode.replays
            if rows is not None:
                rows.append(episode, before + time.perf_counter() - started)
            bar.set_postfix_str(f"{won}/{len(episodes)} succeeded", refresh=False)
            bar.update()
    return episodes, before + time.perf_counter() - started, facts


def _earlier(
    config: EvalConfig, rows: RowsFile | None, header: dict[str, Any]
) -> tuple[list[Episode], float, dict[str, Any]]:
    """Return what an earlier run with ``--resume`` left, rows or a card, and its facts."""
    facts: dict[str, Any] = {"worker_restarts": 0}
    if rows is None or config.out is None or not config.resume:
        return [], 0.0, facts
    if rows.path.exists():
        return *rows.read(), facts
    if not card_path(config.out).exists():
        return [], 0.0, facts
    card = read_card(card_path(config.out))
    check_same(header, card.content, card.path)
    known = card.content["environment"]
    facts = {k: known.get(k) for k in ("worker_restarts", "gl_renderer", "visual_profile")}
    return list(card.episodes), float(card.content.get("wall_seconds", 0.0)), facts


def _films(
    config: EvalConfig, policy: Policy, settings: dict[str, Any], episodes: Sequence[Episode]
) -> list[str]:
    from vla_gym_trainers.evaluation.films import choose, make_films

    assert config.out is not None
    chosen = choose(sorted(episodes, key=lambda episode: episode.start), config.films)
    with tqdm(total=len(chosen), desc="films", unit="film", disable=not config.progress) as bar:
        files = make_films(policy, settings, chosen, films_folder(config.out), bar.update)
    return [str(file) for file in files]
