"""What some RL libraries need so that they learn from the right data; see docs/libraries.md.

Each module imports its library; importing this package imports none.
"""
