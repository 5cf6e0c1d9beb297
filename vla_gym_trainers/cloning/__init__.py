"""Behaviour cloning of the embedded VLA."""
