"""Hostile values and files, drawn by hypothesis from a seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from vla_gym.outside import Object

LONG = "a" * 5000
#: Deeper than any reader goes.
DEEP = json.loads("[" * 200 + "]" * 200)
#: Whole numbers at the edges of what programs count with.
EDGES = (0, -1, 1, 7, 2**31, 2**63, 2**64, 2**200, -(2**63), 10**9)
TEXTS = ("", "\0", "../../etc/passwd", "class:os:system", LONG, "a\nb", "é🙂", "nan", "<script>")
VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(EDGES),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(TEXTS),
    st.text(max_size=20),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    st.just([]),
    st.just({}),
    st.just(DEEP),
)
#: What Python code may be given as well.
ARGUMENTS = st.one_of(
    VALUES,
    st.floats(),
    st.complex_numbers(),
    st.binary(max_size=5),
    st.sampled_from([object(), int, len, range(3), {1, 2}, b"goal"]),
)


def drawn(strategy: st.SearchStrategy[Any], count: int, seed: int) -> list[Any]:
    """Return what a seed draws; at most ``count`` examples, equal ones once."""
    found: list[Any] = []
    count = max(1, count)

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(strategy)
    def draw(example: Any) -> None:
        if len(found) < count:
            found.append(example)

    draw()
    unique = {repr(example): example for example in found}
    return list(unique.values())


@st.composite
def spoilt(draw: Callable[..., Any], text: str) -> str:
    """Return a JSON text that is not what it was: a field, a key, or its bytes are others."""
    how = draw(st.sampled_from(["value"] * 8 + ["gone", "more", "cut", "noise"]))
    if how == "cut":
        return text[: draw(st.integers(0, len(text) - 1))]
    if how == "noise":
        at = draw(st.integers(0, len(text) - 1))
        return text[:at] + draw(st.text(min_size=1, max_size=3)) + text[at + 1 :]
    content = json.loads(text)
    place = draw(st.sampled_from(places(content)))
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    if how == "gone":
        del inner[place[-1]]
    elif how == "more":
        inner[place[-1]] = [inner[place[-1]], draw(VALUES)]
    else:
        inner[place[-1]] = draw(VALUES)
    return json.dumps(content)


def places(content: Object | list[Any]) -> list[tuple[Any, ...]]:
    """Return the places of all values of a document; of long lists those at both ends."""
    found: list[tuple[Any, ...]] = []
    keys = list(content) if isinstance(content, dict) else list(range(len(content)))
    for key in keys if isinstance(content, dict) else dict.fromkeys(keys[:2] + keys[-1:]):
        found.append((key,))
        if isinstance(content[key], dict | list):
            found += [(key, *rest) for rest in places(content[key])]
    return found
