"""How much of a model: sub-models with fewer units."""

from __future__ import annotations

from rota.submodel.cut import Cut, build, extract, keep, scatter
from rota.submodel.units import Layer, Slice, Units, find_units

__all__ = [
    "Cut",
    "Layer",
    "Slice",
    "Units",
    "build",
    "extract",
    "find_units",
    "keep",
    "scatter",
]
