"""Decisions of the router, pure: no I/O, clock, logging, randomness, asyncio, gRPC or HTTP.

`now` comes in, a decision with reasons goes out; ties are broken explicitly.
"""
