"""Sweeps on a Ray cluster. Ray is imported by `coordinator`, `worker` and `client` only, when a sweep asks for it."""
