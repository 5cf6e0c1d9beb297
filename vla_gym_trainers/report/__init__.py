"""``vla-gym report``: one HTML page about training runs and evaluations."""
