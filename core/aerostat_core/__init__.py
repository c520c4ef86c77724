"""The words of the product as values, and the arithmetic on them.

Standard library only; no I/O, no clock, no logging, no randomness anywhere below this package.
"""
