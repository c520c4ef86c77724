"""The parent process of `aerostat up`: lock, preflight, children, the operator's loop, what the user reads meanwhile."""
