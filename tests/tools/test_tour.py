"""examples/tour.ipynb runs, and what it shows is what is committed."""

from __future__ import annotations

import sys

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs pip install -e '.[notebook]'")
pytest.importorskip("nbclient", reason="needs pip install -e '.[notebook]'")


def outputs(notebook) -> list[tuple[str, ...]]:
    """What each cell gave: which kinds of output, and the text that it printed."""
    found = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [(*sorted(output.get("data", {})), output.get("text", "")) for output in found]


@pytest.mark.timeout(600, func_only=True)
def test_tour(tmp_path):
    import run_tour

    committed = nbformat.read(run_tour.NOTEBOOK, as_version=4)
    assert run_tour.NOTEBOOK.stat().st_size < 400_000
    notebook = run_tour.run(tmp_path)
    shown, last = outputs(notebook), outputs(notebook)[-1]
    assert [kind[:-1] for kind in shown] == [kind[:-1] for kind in outputs(committed)]
    assert ("image/png", "text/plain", "") in shown and ("text/html", "text/plain", "") in shown
    assert any("success: True" in text for *_, text in shown)
    assert last[0].startswith("40 chunks; largest correction of an action: 0.")
    assert "/" + sys.prefix.split("/")[1] not in "".join(text for *_, text in outputs(committed))
