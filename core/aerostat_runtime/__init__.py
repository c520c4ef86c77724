"""What every component needs from the world: clock, processes, framed sockets, logging, metrics, the Cluster port.

Shared and impure; it decides nothing.
"""
