"""The cluster: starting or joining Ray, bundles of resources, placement, ports."""
