"""The declared state of the cluster behind one port, and its adapters."""
