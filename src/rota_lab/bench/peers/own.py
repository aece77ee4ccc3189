"""rota itself on a prepared work: whole rounds (draw, train, aggregate, observe), not tested."""

from __future__ import annotations

import sys

import numpy as np
import torch
import work as shared  # type: ignore[import-not-found]

import rota
from rota import loop
from rota.data.federation import Federation, Part
from rota.engine import make
from rota.estimate import FedAvg
from rota.experiment import Experiment
from rota.models import MODELS
from rota.plan import Task
from rota.running.choices import PRECISIONS
from rota.sampling import Uniform


def main(folder: str, name: str, option: str = "") -> None:
    """`option` is the number of threads, or the precision."""
    if option.isdigit():
        torch.set_num_threads(int(option))
    work = shared.load(folder)
    train = Part(torch.from_numpy(work.x), torch.from_numpy(work.y), work.offsets)
    test_x, test_y = torch.from_numpy(work.test_x), torch.from_numpy(work.test_y)
    test = Part(test_x, test_y, np.array([0, len(test_y)]))
    data = Federation("bench", train, test, work.classes)
    task = Task(MODELS[work.model], data, lr=work.lr, batch=work.batch, epochs=work.epochs)
    rounds = len(work.cohorts)
    # one round more than is played, since the last round of an experiment is always tested
    experiment = Experiment(
        [task],
        Uniform(work.cohorts.shape[1]),
        FedAvg(),
        rounds=rounds + 1,
        seed=work.seed,
        evaluate=rounds + 1,
    )
    precision = option if option in PRECISIONS else "fp32"
    engine = make(name, experiment, work.device, precision)
    state = loop.begin(experiment, engine)
    ends = []
    for cohort in work.cohorts:
        state, record = loop.play(experiment, engine, state)
        ends.append(shared.now(work.device))
        if record["cohort"]["bench"] != cohort.tolist():
            raise SystemExit("the round's cohort is not the one that the other systems train")
    score = engine.evaluate(state.models)[0]
    shared.report(work, ends, (score.accuracy, score.loss), rota.__version__)


if __name__ == "__main__":
    main(sys.argv[1], *sys.argv[2].split())
