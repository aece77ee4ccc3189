"""One script per system. Each runs a prepared work in its own process and prints a line of JSON.

Only own.py imports rota.
"""
