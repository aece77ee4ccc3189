"""How much of a model each client trains: capacities, and which units a smaller part keeps."""

from rota.submodel.capacity import Capacity, Exclude, Fixed, Stragglers, Whole
from rota.submodel.choice import Choice, Fjord, HeteroFl, Importance, Ordered, Random, Rolling
from rota.submodel.cut import Cut, build, extract, keep, scatter
from rota.submodel.invariant import Invariant
from rota.submodel.parts import Held, hold
from rota.submodel.units import Layer, Slice, Units, find_units

__all__ = [
    "CAPACITIES",
    "SUBMODELS",
    "Capacity",
    "Choice",
    "Cut",
    "Exclude",
    "Fixed",
    "Fjord",
    "Held",
    "HeteroFl",
    "Importance",
    "Invariant",
    "Layer",
    "Ordered",
    "Random",
    "Rolling",
    "Slice",
    "Stragglers",
    "Units",
    "Whole",
    "build",
    "extract",
    "find_units",
    "hold",
    "keep",
    "scatter",
]

CAPACITIES: dict[str, type] = {
    "whole": Whole,
    "fixed": Fixed,
    "stragglers": Stragglers,
    "exclude": Exclude,
}
SUBMODELS: dict[str, type] = {
    "invariant": Invariant,
    "ordered": Ordered,
    "fjord": Fjord,
    "heterofl": HeteroFl,
    "random": Random,
    "rolling": Rolling,
    "importance": Importance,
}
