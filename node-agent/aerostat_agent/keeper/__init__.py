"""The first process of a node's engine container: starts, signals and reaps engine processes.

Never in here: a decision. It starts what it is told to start, restarts nothing, chooses nothing, and so never needs an
update while engines run. It outlives agents; engines do not outlive it.
"""
