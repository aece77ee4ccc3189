"""A sampler of rota's own, which no source has (docs/samplers.md)."""
