"""Other ways to say LIBERO's instructions.

LIBERO has one sentence a task, and a policy that was cloned on it alone may read single words
only. Cloning on several ways to say it costs nothing; some ways are held back, so that how well a
policy understands words it was not trained on can be measured.
"""

from __future__ import annotations

import re

# Pattern of an instruction -> ways to say it; the last one of each is held back from training.
# Patterns are tried in order. What two goals have in common ("both", "and") is left alone.
_ONE = r"(?!both )(?:(?! and | them ).)+"
_TEMPLATES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"pick up (?P<what>.+) and place it in the basket",
        (
            "put {what} in the basket",
            "place {what} into the basket",
            "grab {what} and drop it into the basket",
            "move {what} to the basket",
            "take {what} and put it in the basket",
        ),
    ),
    (
        r"pick up (?P<what>.+) and place it (?P<where>(?:on|in) .+)",
        (
            "put {what} {where}",
            "place {what} {where}",
            "grab {what} and put it {where}",
            "lift {what} and set it down {where}",
            "take {what} and place it {where}",
        ),
    ),
    (
        r"open (?P<what>the \w+ drawer)(?: of the cabinet)? and put (?P<it>.+) inside",
        (
            "pull open {what} and place {it} in it",
            "put {it} inside {what} after opening it",
            "open {what} of the cabinet then put {it} into it",
            "open {what} and place {it} inside",
        ),
    ),
    (
        rf"open (?P<what>{_ONE})",
        (
            "pull open {what}",
            "pull {what} open",
            "please open {what}",
            "slide {what} open",
        ),
    ),
    (
        rf"turn (?P<way>on|off) (?P<what>{_ONE})",
        (
            "switch {way} {what}",
            "switch {what} {way}",
            "please turn {way} {what}",
            "turn {what} {way}",
        ),
    ),
    (
        rf"push (?P<what>.+) to the front of (?P<where>{_ONE})",
        (
            "slide {what} to the front of {where}",
            "move {what} in front of {where}",
            "push {what} over to the front of {where}",
            "slide {what} in front of {where}",
        ),
    ),
    (
        rf"put (?P<what>{_ONE}?) (?P<where>(?:on|in) {_ONE})",
        (
            "place {what} {where}",
            "set {what} down {where}",
            "grab {what} and put it {where}",
            "move {what} so that it is {where}",
            "take {what} and place it {where}",
        ),
    ),
)


def paraphrases(instruction: str, held_out: bool = False) -> list[str]:
    """Return other ways to say an instruction, in a fixed order.

    Args:
        instruction: In the words of LIBERO's tasks, e.g. ``"put the bowl on the plate"``.
        held_out: Return the one way that training leaves out instead of those it uses.

    Returns:
        Three or four sentences (one with ``held_out``); none for an instruction whose form is
        unknown.
    """
    text = " ".join(instruction.lower().split())
    for pattern, ways in _TEMPLATES:
        found = re.fullmatch(pattern, text)
        if found:
            chosen = ways[-1:] if held_out else ways[:-1]
            return [way.format(**found.groupdict()) for way in chosen]
    return []
