"""What the agent decides, as pure functions: `now` comes in, a decision with its reasons goes out.

Never in here: I/O, clocks, logging, randomness, asyncio, protobuf.
"""
