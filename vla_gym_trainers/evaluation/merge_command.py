"""``vla-gym eval-merge`` from start to end."""

from __future__ import annotations

import sys

from vla_gym.errors import ConfigError
from vla_gym_trainers.evaluation.cards import (
    card_path,
    check_comparable,
    check_out,
    merge,
    read_card,
)
from vla_gym_trainers.evaluation.command import Card, card_of, where_played
from vla_gym_trainers.evaluation.config import MergeConfig
from vla_gym_trainers.evaluation.tables import print_results, title_of
from vla_gym_trainers.runs.result_card import write_json


def main_merge(config: MergeConfig) -> int:
    """Merge cards, print the tables; return the exit status."""
    card = run_merge(config)
    print_results(card["results"], title_of(card["protocol"]))
    renderers = card["environment"]["gl_renderers"]
    if len(renderers) > 1:
        sys.stdout.write(
            f"Note: the parts were rendered by different OpenGL drivers: {', '.join(renderers)}.\n"
        )
    if config.out is not None:
        sys.stdout.write(f"result card: {card_path(config.out)}\n")
    return 0


def run_merge(config: MergeConfig) -> Card:
    """Merge cards as configured; write the card if ``config.out`` says where.

    Raises:
        ConfigError: If they cannot be read, do not fit together or are not complete.
    """
    if not config.cards:
        raise ConfigError("eval-merge needs at least one result card.")
    other = None if config.paired is None else read_card(config.paired)
    if config.out is not None:
        with check_out(config.out, resume=False):
            pass
    cards = [read_card(path) for path in config.cards]
    episodes = merge(cards, partial=config.partial)
    protocol = cards[0].protocol
    if other is not None:
        check_comparable(protocol, other)
    facts = where_played([card.content["environment"] for card in cards])
    card = card_of(config, protocol, facts, episodes, other) | {
        "shard": None,
        "versions": cards[0].content["versions"],
        "wall_seconds": round(sum(float(c.content.get("wall_seconds", 0)) for c in cards), 2),
    }
    if config.out is not None:
        write_json(card_path(config.out), card)
    return card
