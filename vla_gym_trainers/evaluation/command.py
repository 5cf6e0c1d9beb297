"""``vla-gym eval`` from start to end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

from vla_gym.assets import resolve_asset_pack
from vla_gym.errors import ConfigError
from vla_gym.rollout import Episode, Policy, Start, play
from vla_gym.rollout.workers import WatchGoals
from vla_gym.suites import get_suite, get_task
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
    starts_of,
)
from vla_gym_trainers.evaluation.config import EvalConfig, MergeConfig, held_options
from vla_gym_trainers.evaluation.films import choose, make_films
from vla_gym_trainers.evaluation.summary import check_paired, compare, summarize
from vla_gym_trainers.evaluation.tables import print_results, title_of
from vla_gym_trainers.runs.result_card import (
    machine_facts,
    make_card,
    software_versions,
    to_plain,
    write_json,
)

Card = dict[str, Any]


def main(config: EvalConfig) -> int:
    """Evaluate, print tables and files; return the exit status."""
    try:
        card = run_eval(config)
    except KeyboardInterrupt as error:
        advice = "" if config.out is None else " Go on with the same command and --resume."
        raise KeyboardInterrupt(f"Stopped.{advice}") from error
    print_results(card["results"], title_of(card["protocol"]))
    if restarts := card["environment"]["worker_restarts"]:
        sys.stdout.write(f"Episodes begun again because their worker had died: {restarts}.\n")
    if config.out is not None:
        if films := card.get("films"):
            sys.stdout.write(f"films: {len(films)} files in {films_folder(config.out)}\n")
        sys.stdout.write(f"result card: {card_path(config.out)}\n")
    return 0


def run_eval(config: EvalConfig) -> Card:
    """Evaluate as configured; write the films and the card, and return it.

    Raises:
        VlaGymError: If an option is wrong or something cannot be loaded; nothing was played then.
    """
    config.check()
    starts = config.my_starts()
    for suite, task_id in dict.fromkeys((start.suite, start.task_id) for start in starts):
        get_suite(suite).check_assets(get_task(suite, task_id), config.assets)
    other = None if config.paired is None else read_card(config.paired)
    with ExitStack() as stack:
        if config.out is not None:
            stack.enter_context(check_out(config.out, resume=config.resume))
        if config.needs_torch:
            from vla_gym_trainers.runs.torch_helpers import torch_threads

            stack.enter_context(torch_threads(config.torch_threads))
        policy = config.make_policy()
        protocol = make_protocol(config, policy)
        starts_of(protocol)  # so many that no card holds them are refused before they are played
        if other is not None:
            check_comparable(protocol, other)
            check_paired(starts, other.episodes)
        settings: dict[str, Any] = {
            **config.env_kwargs(),
            **config.rules.env_kwargs(),
            "env_wrappers": [WatchGoals] if config.confusion else [],
        }
        # What must be the same where an evaluation goes on.
        header = {
            "kind": "eval-rows",
            "shard": list(config.shard()),
            "protocol": protocol,
            "versions": software_versions(),
        }
        rows = None if config.out is None else RowsFile(card_path(config.out), header)
        episodes, seconds, facts = _play(config, policy, settings, starts, rows)
        card = card_of(config, protocol, facts, episodes, other)
        card["shard"], card["wall_seconds"] = header["shard"], round(seconds, 2)
        if rows is not None:
            # Before the films: what was counted must not be lost with them.
            write_json(rows.card, card)
            rows.path.unlink(missing_ok=True)
            if config.films:
                card["films"] = _films(config, policy, settings, episodes)
                write_json(rows.card, card)
    return card


def make_protocol(config: EvalConfig, policy: Policy) -> dict[str, Any]:
    """Return all that the results depend on but for versions, as plain JSON types.

    Raises:
        AssetError: If the asset pack is missing.
    """
    pack = resolve_asset_pack(config.assets)
    tasks: dict[str, list[int]] = {}
    for suite, task_id in dict.fromkeys((s.suite, s.task_id) for s in config.starts()):
        tasks.setdefault(suite, []).append(task_id)
    known = [get_task(suite, i) for suite, ids in tasks.items() for i in ids]
    files = {task.key: task.facts for task in known if task.facts}
    sees = bool(policy.cameras)
    return to_plain(
        {
            "policy": policy.identity,
            "name": config.protocol,
            "tasks": tasks,
            "episodes": config.num_states(),
            **({} if config.first_seed is None else {"first_seed": config.first_seed}),
            **({"files": files} if files else {}),
            "chunk_len": None if policy.expert else policy.chunk_len,
            "batch_size": config.batch_size if sees else None,
            "torch_threads": config.torch_threads if sees else None,
            **({"device": config.device} if sees and config.device != "cpu" else {}),
            "assets": {"name": pack.name, "digest": pack.digest},
            "physics": config.physics,
            "variation": config.variation if config.episodes_a_look else None,
            "scene_reset_interval": config.episodes_a_look,
            "confusion": config.confusion,
            **config.rules.env_kwargs(),
            "vla_options": {k: held_options(policy).get(k) for k in config.rules.vla_options},
            "max_control_steps": {
                suite: config.rules.max_control_steps
                or max(get_suite(suite).tasks[i].max_control_steps for i in ids)
                for suite, ids in tasks.items()
            },
            "image_size": policy.image_size if sees else None,
        }
    )


def _play(
    config: EvalConfig,
    policy: Policy,
    settings: Mapping[str, Any],
    starts: Sequence[Start],
    rows: RowsFile | None,
) -> tuple[list[Episode], float, dict[str, Any]]:
    """Play what an earlier run has not; return all episodes, the seconds they took, and facts."""
    episodes: list[Episode] = []
    worlds: list[dict[str, Any]] = []
    before = 0.0
    if rows is not None and config.resume:
        if rows.path.exists():
            episodes, before, worlds = rows.read()
        elif rows.card.exists():
            card = read_card(rows.card)
            check_same(rows.header, card.content, card.path, ("shard", "protocol", "versions"))
            worlds = [card.content["environment"]]
            episodes, before = list(card.episodes), float(card.content.get("wall_seconds", 0.0))
    played = {episode.start for episode in episodes}
    if len(played) < len(episodes) or not played <= set(starts):
        raise ConfigError(
            f"{config.out} holds episodes twice, or of another evaluation: delete it and play "
            "again."
        )
    left = [start for start in starts if start not in played]
    if rows is not None and left and not rows.path.exists():
        rows.begin()
    started = time.perf_counter()
    facts: dict[str, Any] = machine_facts()
    with tqdm(
        total=len(starts),
        initial=len(episodes),
        desc=policy.name,
        unit="episode",
        disable=not config.progress,
    ) as bar:
        for episode in play(
            policy,
            left,
            facts=facts,
            num_envs=config.num_envs,
            workers=config.workers,
            hosts=config.hosts,
            **settings,
        ):
            episodes.append(episode)
            if rows is not None:
                rows.append(episode, before + time.perf_counter() - started, facts)
            won = sum(e.success for e in episodes)
            bar.set_postfix_str(f"{won}/{len(episodes)} succeeded", refresh=False)
            bar.update()
    worlds += [facts] if left else []
    seconds = before + time.perf_counter() - started
    where = where_played(worlds)
    if len(where["machines"]) == 1 and len(where["gl_renderers"]) < 2:
        (machine,), renderers = where.pop("machines"), where.pop("gl_renderers")
        where |= {**machine, "gl_renderer": next(iter(renderers), None)}
    return episodes, seconds, where


def where_played(worlds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return where episodes were played; each machine and each driver counts once."""
    renderers = {
        str(gl) for w in worlds for gl in w.get("gl_renderers", [w.get("gl_renderer")]) if gl
    }
    machines: list[Any] = []
    keys = (*machine_facts(), "gpu")
    for world in worlds:
        mine = {key: world[key] for key in keys if key in world}
        machines += [m for m in world.get("machines", [mine]) if m and m not in machines]
    profiles = [w["visual_profile"] for w in worlds if w.get("visual_profile")]
    return {
        "visual_profile": next(iter(profiles), None),
        "gl_renderers": sorted(renderers),
        "machines": machines,
    }


def card_of(
    config: EvalConfig | MergeConfig,
    protocol: Mapping[str, Any],
    facts: Mapping[str, Any],
    episodes: Sequence[Episode],
    other: EvalCard | None,
) -> Card:
    """Return the card of episodes in any order, with the comparison if there is another card."""
    order = {start: index for index, start in enumerate(starts_of(protocol))}
    episodes = sorted(episodes, key=lambda episode: order[episode.start])
    results = summarize(episodes, confusion=protocol["confusion"])
    if other is not None:
        paired = {"with": str(other.path), "policy": other.protocol["policy"]}
        results["paired"] = paired | compare(episodes, other.episodes)
    world = {
        "asset_pack": protocol["assets"]["name"],
        "asset_pack_digest": protocol["assets"]["digest"],
        **{k: protocol.get(k) for k in ("physics", "variation", "scene_reset_interval")},
        "chunk_len": protocol["chunk_len"],
    }
    card = make_card(
        KIND,
        config=config,
        seeds={"policy": protocol["policy"].get("seed")},
        environment={**world, **facts, "worker_restarts": sum(e.replays for e in episodes)},
        results=results,
    )
    return card | {"schema": SCHEMA, "protocol": protocol}


def _films(
    config: EvalConfig, policy: Policy, settings: dict[str, Any], episodes: Sequence[Episode]
) -> list[str]:
    assert config.out is not None
    chosen = choose(sorted(episodes, key=lambda episode: episode.start), config.films)
    files = make_films(policy, settings, chosen, films_folder(config.out))
    bar = tqdm(files, "films", len(chosen), unit="film", disable=not config.progress)
    return [str(file) for file in bar]
