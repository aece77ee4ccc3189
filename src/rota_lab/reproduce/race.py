"""A race to a target accuracy between learning rates.

There is one model per learning rate and seed. All of them train together until no other rate can
win. The models are tasks of one experiment that differ only in their learning rate, so the batched
engine trains them in the same stacks. A model that is out of the race is in no cohort and is not
tested any more, so it costs nothing.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from rota import rng
from rota.arrays import Array
from rota.engine import Engine
from rota.experiment import Experiment
from rota.loop import begin, play
from rota.plan import Model, Plan, Seen, State
from rota.sampling import draw
from rota_lab.reproduce.parts import in_time

FAR, SELDOM = 2.0, 5
"""A model whose best error so far is above FAR times the target's is tested every SELDOM rounds."""
LAG = 1.5
"""A rate is too slow if another rate was more accurate after LAG times fewer rounds."""
REACHED, SLOWER, BEHIND = "reached", "cannot win any more", "far behind"
DIVERGED, LIMIT = "diverged", "out of rounds"


@dataclass(frozen=True)
class Cohorts:
    """Uniform cohorts, with a size for each model (0: the model rests).

    A model's cohort does not depend on which other models train.
    """

    sizes: tuple[int, ...]

    def init(self, shares: Array, rounds: int) -> State:
        return {}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        streams = generator.integers(1 << 63, size=len(self.sizes)).tolist()
        plans = []
        for model, size in enumerate(self.sizes):
            if size:
                plan = draw.fixed(size, shares[[model]], rng.generator(streams[model]))
                plans.append(replace(plan, model=np.full(len(plan), model)))
        return draw.concatenate(plans)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return state


@dataclass
class Lane:
    """One model in the race: its learning rate (a place in the grid), its seed, and its task.

    `curve` has a point (round, best accuracy so far) per test. `rounds` is where the curve crosses
    the target; None until it does.
    """

    rate: int
    seed: int
    model: int
    rounds: float | None = None
    why: str = ""
    """Why the model is out of the race; empty while it is in."""
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> float:
        return self.curve[-1][1] if self.curve else 0.0

    @property
    def played(self) -> int:
        return self.curve[-1][0] if self.curve else 0

    def level(self, now: float) -> float:
        """The best accuracy in the first `now` rounds."""
        tests = bisect.bisect_right(self.curve, now, key=lambda point: point[0])
        return self.curve[tests - 1][1] if tests else 0.0

    def due(self, now: int, target: float) -> bool:
        """Whether the model is tested in this round."""
        return now % SELDOM == 0 or 1 - self.best <= FAR * (1 - target)

    def tested(self, now: int, accuracy: float, target: float) -> None:
        """Record a test.

        The curve is made monotonic. It crosses the target on the line between its last two points.
        """
        if accuracy >= target:
            before = self.curve[-1] if self.curve else (0, 0.0)
            self.rounds = crossing(before, (now, accuracy), target)
            self.why = REACHED
        self.curve.append((now, max(self.best, accuracy)))


def crossing(before: tuple[int, float], after: tuple[int, float], target: float) -> float:
    """Where the line between two points (round, accuracy) of a curve crosses the target."""
    (start, low), (end, high) = before, after
    return start + (end - start) * (target - low) / (high - low)


def race(
    experiment: Experiment,
    engine: Engine,
    lanes: list[Lane],
    cohort: int,
    target: float,
    limit: int,
    *,
    beat: float = math.inf,
    lag_from: float = math.inf,
    deadline: float = math.inf,
    watch: Callable[[int], None] | None = None,
) -> None:
    """Run the lanes until each one has reached the target or is out of the race.

    Tasks of `experiment` and `engine` that are not in a lane rest. `beat` is the number of rounds
    that the best rate so far took. The rule against slow rates (LAG) applies from round `lag_from`.
    """
    names = experiment.names
    sizes = [0] * len(names)
    # the race tests those models that are due, so the experiment itself must test none
    experiment = replace(experiment, rounds=limit + 1, evaluate=limit + 2, target=None)
    state = begin(experiment, engine)
    examine(engine, state.models, lanes, 0, target)
    for now in range(1, limit + 1):
        running = [lane for lane in lanes if not lane.why]
        if not running:
            return
        in_time(deadline)
        for lane in lanes:
            sizes[lane.model] = 0 if lane.why else cohort
        experiment = experiment.using(sampler=Cohorts(tuple(sizes)))
        state, record = play(experiment, engine, state)
        trained = {name: line["trained"] for name, line in record["models"].items()}
        stop([lane for lane in running if not trained[names[lane.model]]], DIVERGED)
        due = [lane for lane in running if not lane.why and lane.due(now, target)]
        examine(engine, state.models, due, now, target)
        judge(lanes, now, target, beat, lag=now >= lag_from)
        if watch:
            watch(now)
    stop(lanes, LIMIT)


def examine(
    engine: Engine, models: list[Model], lanes: list[Lane], now: int, target: float
) -> None:
    """Test the lanes' models, all in one pass."""
    scores = engine.evaluate(models, [lane.model for lane in lanes])
    for lane, score in zip(lanes, scores, strict=True):
        lane.tested(now, score.accuracy, target)


def stop(lanes: Iterable[Lane], why: str) -> None:
    """Take lanes out of the race, unless they are out already."""
    for lane in lanes:
        lane.why = lane.why or why


def judge(lanes: list[Lane], now: int, target: float, beat: float, lag: bool) -> None:
    """Take rates that cannot win out of the race. All seeds of a rate are judged together."""
    rates = by_rate(lanes)
    finished = [rounds for mine in rates.values() if (rounds := mean_rounds(mine)) is not None]
    beat = min([beat, *finished])
    ahead = max(_level(mine, now / LAG, target) for mine in rates.values())
    for mine in rates.values():
        # a lane that has not reached the target needs more than `now` rounds
        rounds = float(np.mean([now if lane.rounds is None else lane.rounds for lane in mine]))
        if any(lane.why == DIVERGED for lane in mine):
            stop(mine, DIVERGED)
        elif rounds >= beat:
            stop(mine, SLOWER)
        elif lag and _level(mine, now, target) < ahead:
            stop(mine, BEHIND)


def _level(lanes: list[Lane], now: float, target: float) -> float:
    return float(np.mean([min(lane.level(now), target) for lane in lanes]))


def by_rate(lanes: list[Lane]) -> dict[int, list[Lane]]:
    """The lanes of each learning rate, in the order of the rates."""
    rates: dict[int, list[Lane]] = {rate: [] for rate in sorted({lane.rate for lane in lanes})}
    for lane in lanes:
        rates[lane.rate].append(lane)
    return rates


def mean_rounds(lanes: list[Lane]) -> float | None:
    """The mean number of rounds to the target; None unless all lanes have reached it."""
    rounds = [lane.rounds for lane in lanes if lane.rounds is not None]
    return float(np.mean(rounds)) if len(rounds) == len(lanes) else None


def winner(lanes: list[Lane]) -> int:
    """The best rate: the one whose seeds took the fewest rounds on average.

    If no rate has all of its seeds at the target, the rate with the largest part of its seeds there
    wins, and among equals the most accurate one.
    """

    def merit(mine: list[Lane]) -> tuple[float, float, float]:
        rounds = mean_rounds(mine)
        reached = sum(lane.rounds is not None for lane in mine) / len(mine)
        accuracy = float(np.mean([lane.best for lane in mine]))
        return -math.inf if rounds is None else -rounds, reached, accuracy

    rates = by_rate(lanes)
    return max(rates, key=lambda rate: merit(rates[rate]))
