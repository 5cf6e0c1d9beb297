"""Run examples/tour.ipynb and keep its outputs in it, without the times and paths of a run.

Usage: python tools/run_tour.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "tour.ipynb"


def run(folder: str | Path) -> nbformat.NotebookNode:
    """Return the notebook as it is after running in ``folder``.

    Raises:
        CellExecutionError: If a cell raises.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = NotebookClient(
        notebook, timeout=300, record_timing=False, resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("image/jpeg", None)  # the same picture as image/png
    return notebook


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        nbformat.write(run(scratch), NOTEBOOK)
