"""One script a system: each runs a prepared work in its own process and prints one line of JSON. They import no rota, but for own.py."""
