"""Demonstrations of the scripted experts, recorded in LIBERO's format."""
