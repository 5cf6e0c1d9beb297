"""``vla-gym report``: one HTML page about training runs and evaluations."""

from __future__ import annotations
