"""Vector environments: many environments over worker processes."""
