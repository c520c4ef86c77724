"""Nodes for the API server: machines made of namespaces, each with containerd, kubelet and kube-proxy, on one bridge.

`cluster` has the whole (class `Nodes`), `machine` one of them, `keeper` what ends it all, `init` the first process inside.
Nothing of the host's network and mounts changes; of its cgroups there is one below the caller's, which goes with the cluster.
"""
