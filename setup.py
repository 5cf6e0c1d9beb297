"""Which packages there are; all else is in pyproject.toml.

`wrappers/` and `configs/` stand at the top of the repository. A checkout has them in vla_gym/ as
symlinks, too, a source distribution has not: so they are named here.
"""

from setuptools import find_packages, setup

found = find_packages(include=["vla_gym", "vla_gym.*", "vla_gym_trainers", "vla_gym_trainers.*"])
setup(packages=sorted({*found, "vla_gym.wrappers", "vla_gym.configs"}))
