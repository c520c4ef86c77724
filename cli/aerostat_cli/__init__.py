"""`aerostat`: run it all from a folder of manifests, look at it, talk to it.

One module per command in `commands`; `standalone` is the parent process of `aerostat up`. No policy lives here: what
is decided is decided by the operator, the routers and the agents, which this package starts.
"""
