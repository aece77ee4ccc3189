# Your own choice of units: a part keeps evenly spaced units, and others in every round.
import numpy as np

import rota
from rota.submodel import Fixed


class Spaced:
    def init(self, units):  # units[s].layers: the layers of model s whose units can be left out
        return {}

    def keep(self, state, wanted, generator):  # wanted.counts[i] units of layer i, ascending
        kept = []
        for layer, count in zip(wanted.units.layers, wanted.counts, strict=True):
            spaced = np.arange(count) * layer.size // count
            kept.append(np.sort((spaced + wanted.now) % layer.size))
        return kept


task = rota.Task(rota.models.two_nn, rota.data.digits())
run = rota.run([task], capacity=Fixed((1, 0.5, 0.25)), submodel=Spaced(), rounds=30)
print(run.summary["accuracy"])
