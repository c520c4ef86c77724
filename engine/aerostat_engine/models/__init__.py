"""From a source URI to a folder that SGLang serves: fetch, convert, check, describe, probe.

Nothing here imports SGLang. Only `convert` and `probe` import torch and transformers, and only when they are needed: a model that
is in the cache is described in milliseconds.
"""
