"""Pretraining of the RL token, and probes of what it keeps."""
