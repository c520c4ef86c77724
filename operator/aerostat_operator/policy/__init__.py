"""Decisions of the operator: values in, values with reasons out. No I/O, clock, logging or randomness in here."""
