"""Small Ray clusters on one machine, on its loopback alone."""

from __future__ import annotations

from typing import Any

from ray.cluster_utils import Cluster

# Not 127.0.0.1, which Ray takes for "this machine's address in the network".
NODE: dict[str, Any] = {
    "node_ip_address": "127.0.0.2",
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
}


def small_cluster(nodes: int) -> Cluster:
    """A head node that simulates nothing, and nodes that do."""
    head = {"num_cpus": 0, **NODE}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
    for _ in range(nodes):
        add_node(cluster, wait=False)
    cluster.wait_for_nodes()
    return cluster


def add_node(cluster: Cluster, *, wait: bool = True) -> Any:
    return cluster.add_node(num_cpus=1, resources={"sim": 1}, wait=wait, **NODE)


def node_of(cluster: Cluster, envs: Any, part: int) -> Any:
    """The node that a part of a vector env is on."""
    wanted = envs._pool._hosts._placed[part]
    return next(node for node in cluster.worker_nodes if node.node_id == wanted)
