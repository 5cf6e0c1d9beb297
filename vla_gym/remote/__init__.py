"""A vector environment whose environments run in parts, on other machines or in threads.

One part is a whole :class:`~vla_gym.vector.LiberoVectorEnv` with the vector wrappers that belong
to it, say a frozen VLA: one message goes to it and one comes back a step::

    RemoteVectorEnv -> RemotePool -> Shard -> Part -> FrozenVLAObservation -> LiberoVectorEnv
    (your process: table, faults)   (Ray)    (a node's process and its workers)

Nothing here imports Ray but :mod:`vla_gym.remote.ray_hosts`, which is imported when it is asked
for.
"""
