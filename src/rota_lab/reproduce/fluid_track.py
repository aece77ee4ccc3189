"""One run of FLuID's accuracy studies, or one for several seeds at once."""

from __future__ import annotations

import numpy as np

from rota import loop
from rota.engine import make
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.experiment import State as RunState
from rota.submodel import Capacity, Choice, Invariant, Ordered, Whole
from rota_lab.reproduce.fluid_settings import Setting
from rota_lab.reproduce.parts import Found, Runner, in_time

EVERY = 5
"""The rounds between two points of a curve."""


class Track:
    """A setting's engine for some seeds, each of which has a task. All methods run on it."""

    def __init__(self, setting: Setting, seeds: tuple[int, ...], runner: Runner) -> None:
        self.setting, self.seeds, self.deadline = setting, seeds, runner.deadline
        self.tasks = [setting.task(seed) for seed in seeds]
        whole = self.experiment(Whole(), Ordered())
        self.engine = make("auto", whole, runner.device, runner.precision)

    def experiment(self, capacity: Capacity, choice: Choice) -> Experiment:
        return Experiment(
            self.tasks,
            self.setting.sampler,
            FedAvg(),
            rounds=self.setting.rounds,
            seed=self.seeds[0],
            evaluate=self.setting.rounds + 1,
            capacity=capacity,
            submodel=choice,
        )

    def run(self, capacity: Capacity, choice: Choice) -> list[Found]:
        """One run in numbers, by seed: the accuracy at the end, its curve, costs, invariant units.

        The costs of a run of several seeds are shared out evenly.
        """
        experiment, setting = self.experiment(capacity, choice), self.setting
        state, client_seconds = loop.begin(experiment, self.engine), 0.0
        end: list[list[float]] = []
        curve: dict[int, list[float]] = {}
        invariant: list[list[tuple[float, float]]] = []
        while state.round < setting.rounds:
            in_time(self.deadline)
            if isinstance(choice, Invariant):
                invariant.append([invariance(experiment, state, s) for s in range(len(self.seeds))])
            state, line = loop.play(experiment, self.engine, state)
            client_seconds += line["client_seconds"]
            counts = state.round > setting.rounds - setting.last
            if counts or state.round % EVERY == 0:
                scores = [score.accuracy for score in self.engine.evaluate(state.models)]
                end += [scores] * counts
                if state.round % EVERY == 0:
                    curve[state.round] = [float(f"{score:.5g}") for score in scores]
        out: list[Found] = []
        for s in range(len(self.seeds)):
            numbers: Found = {
                "accuracy": float(np.mean([scores[s] for scores in end])),
                "curve": {"rounds": list(curve), "accuracy": [each[s] for each in curve.values()]},
                "bytes": (state.bytes_up + state.bytes_down) / len(self.seeds),
                "virtual_seconds": state.seconds / len(self.seeds),
                "client_seconds": client_seconds / len(self.seeds),
            }
            if invariant:
                mine = [each[s] for each in invariant]
                share, filled = np.mean(mine[setting.rounds // 2 :], axis=0).tolist()
                numbers |= {"invariant": share, "filled": filled}
                numbers["invariant_curve"] = [round(share, 4) for share, _ in mine]
            out.append(numbers)
        return out


def invariance(experiment: Experiment, state: RunState, s: int = 0) -> tuple[float, float]:
    """The share of model s's invariant units, and of those to be dropped the share that is so.

    The second is over the layers of the narrowest part.
    """
    known, units = state.policies["submodel"], experiment.units[s]
    widths = experiment.capacity.widths(state.policies["capacity"])
    assert widths is not None
    number, filled = 0, []
    for at, (layer, kept) in enumerate(
        zip(units.layers, units.counts(float(widths[widths > 0].min())), strict=True)
    ):
        invariant, gone = int(known[f"invariant.{s}.{at}"].sum()), layer.size - kept
        number += invariant
        if gone:
            filled.append(min(1.0, invariant / gone))
    return number / sum(layer.size for layer in units.layers), float(np.mean(filled or [1.0]))
