"""A node's agent: decides which engines run on its node, and tells routers and the operator what is there.

Never in here: a device, a tensor, an engine's code. It acts through the keeper and hears through sockets, so it may end at any time
without taking anything down. `policy` decides, `supervisor` carries out, `node` is all that is known; `keeper` is a program of its own.
"""
