"""``vla-gym eval-merge``: the cards of shards become one."""

from __future__ import annotations

import sys
from typing import Any

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.cards import (
    KIND,
    SCHEMA,
    card_path,
    check_comparable,
    check_out,
    merge,
    read_card,
    results_of,
    world_of,
)
from vla_gym_trainers.evaluation.config import MergeConfig
from vla_gym_trainers.evaluation.tables import print_card
from vla_gym_trainers.runs.result_card import machine_facts, make_card, to_plain, write_json


def main_merge(config: MergeConfig) -> int:
    """Merge cards, print the tables; return the exit status."""
    card = run_merge(config)
    print_card(card)
    renderers = card["environment"]["gl_renderers"]
    if len(renderers) > 1:
        sys.stdout.write(
            f"Note: the parts were rendered by different OpenGL drivers: {', '.join(renderers)}.\n"
        )
    if config.out is not None:
        sys.stdout.write(f"result card: {card_path(config.out)}\n")
    return 0


def run_merge(config: MergeConfig) -> dict[str, Any]:
    """Merge cards as configured; write the card if ``config.out`` says where.

    Raises:
        ConfigError: If they cannot be read, do not fit together or are not complete.
    """
    if not config.cards:
        raise ConfigError("eval-merge needs at least one result card.")
    other = None if config.paired is None else read_card(config.paired)
    if config.out is not None:
        check_out(config.out, resume=False)
    cards = [read_card(path) for path in config.cards]
    episodes = merge(cards, partial=config.partial)
    protocol = cards[0].protocol
    if other is not None:
        check_comparable(protocol, other)
    worlds = [card.content["environment"] for card in cards]
    card = make_card(
        KIND,
        config=config,
        seeds=cards[0].content["seeds"],
        environment={
            **world_of(protocol),
            "visual_profile": worlds[0].get("visual_profile"),
            "gl_renderers": sorted({str(w.get("gl_renderer")) for w in worlds}),
            "worker_restarts": sum(int(w.get("worker_restarts") or 0) for w in worlds),
            "machines": [{key: w.get(key) for key in machine_facts()} for w in worlds],
        },
        results=results_of(episodes, protocol, other),
    )
    card |= {
        "schema": SCHEMA,
        "protocol": protocol,
        "shard": None,
        "versions": cards[0].content["versions"],
        "wall_seconds": round(sum(float(c.content.get("wall_seconds", 0)) for c in cards), 2),
    }
    if config.out is not None:
        write_json(card_path(config.out), card)
    plain: dict[str, Any] = to_plain(card)
    return plain
