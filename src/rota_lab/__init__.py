"""Reproductions of the sources, and benchmarks against peers.

This package stands beside rota. Of rota, only the commands `reproduce` and `bench` import it, and
only when they are called.
"""
