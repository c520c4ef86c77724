"""A real Kubernetes for tests: its programs built from Go modules (`e2e/cluster`), an API server of the suite's own.

Everything listens on 127.0.0.1, lives in a folder of its own and ends with the process that started it.
"""
