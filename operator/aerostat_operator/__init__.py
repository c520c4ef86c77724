"""The operator: which models may live on which instances, pool membership, roll-up of status. Never on the path of a request.

`policy/` decides (pure), `reading` and `builders` translate at the edge, `reconcile` executes, `loop` runs it.
"""
