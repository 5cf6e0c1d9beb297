"""Presets of the trainers and the command line, one yaml file each."""
