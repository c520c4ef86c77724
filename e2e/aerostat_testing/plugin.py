"""Fixtures shared by the suites of all components; loaded as a pytest plugin, since there are no `conftest.py` files."""
