"""The product's images, built from their Dockerfiles on a machine without Docker and without a registry.

Nothing in here knows of nodes: `nodes/images.py` gives them what is built.
"""
