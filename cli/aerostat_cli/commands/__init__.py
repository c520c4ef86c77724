"""One module per command: `add_parser` declares its arguments, `run` carries it out and returns the exit code.

`run` is a plain function: it starts the loop where it needs one.
"""
