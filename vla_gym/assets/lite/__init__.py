"""The ``lite`` pack: LIBERO's scene rebuilt from boxes, cylinders and ellipsoids.

One module per family of objects writes MJCF with LIBERO's bodies, joints, sites and masses but
with geometry of our own; :mod:`.generate` puts a whole pack into a folder; :mod:`.robot` replaces
the robot's visual meshes.
"""
