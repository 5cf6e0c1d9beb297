"""Images of a simulation: ``renderer`` is what environments use, ``painter`` chooses who draws.

MuJoCo's own renderer (``mujoco_painter``) draws on GPUs; ``software`` is a quicker one for
machines without.
"""
