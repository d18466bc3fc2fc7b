from .config import ClusterConfig as ClusterConfig
from .resources import ResourceManager as ResourceManager
from .start import (
    init_ray as init_ray,
    shutdown_ray as shutdown_ray,
    wait_for_nodes as wait_for_nodes,
)
from .virtual_cluster import RayVirtualCluster as RayVirtualCluster
