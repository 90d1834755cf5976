"""`ray start` for a further node that stays on 127.0.0.1.

Ray starts no second node with the setting that keeps it on loopback (RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0, see
service/cluster/ray/embedded.py), and without the setting it replaces 127.0.0.1 by the address of the network.
"""

from ray._private import ray_constants, services

from octet.service.cluster.ray import command

if __name__ == "__main__":
    ray_constants.ENABLE_RAY_CLUSTER = True
    services.resolve_ip_for_localhost = lambda address: address
    command.main()
