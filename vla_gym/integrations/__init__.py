"""What some RL libraries need so that the data that they learn from is right; see docs/libraries.md.

Each module imports its library; importing this package imports none.
"""
