"""What the suites of all components share: strictness about leaks, waiting with a deadline, a real `aerostat up`.

Nothing here imports a component but core and runtime: a test that needs one imports it itself.
"""
