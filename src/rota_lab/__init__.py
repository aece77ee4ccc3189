"""Reproductions of the sources, and benchmarks against peers.

This package is separate from rota. In rota, only the commands `reproduce` and `bench` import it,
and only when they are called.
"""
