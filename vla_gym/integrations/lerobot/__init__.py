"""LIBERO in LeRobot: environments for its evaluation, demonstrations as its datasets.

``envs`` and ``dataset`` import lerobot; this package and ``observation`` do not.
"""
