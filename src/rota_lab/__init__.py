"""The laboratory: reproductions of the sources and benchmarks against peers. Nothing in rota needs it."""
