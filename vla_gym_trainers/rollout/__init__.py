"""Collecting for all trainers: how far ahead of learning, and from which environments."""
