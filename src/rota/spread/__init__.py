"""One experiment in several processes, with the same models to the bit as in one.

start.py    how the processes begin and end
hands.py    who trains what: rows are dealt out by the time that they should take
engines.py  the engines of one process, with the training dealt out
wire.py     what travels between the processes
"""

from rota.spread.hands import Lost
from rota.spread.start import Processes

__all__ = ["Lost", "Processes"]
