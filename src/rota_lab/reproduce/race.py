"""A race to a target accuracy: one model for every learning rate and seed, trained together until no other rate can win.

The models are tasks of one experiment that differ in nothing but their learning rate, so that the batched engine trains them in the same
stacks. A model that is out of the race is in nobody's cohort and is not tested any more: it costs nothing.
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
"""A model whose best error so far is above FAR times the target's is tested every SELDOM rounds only."""
LAG = 1.5
"""A rate is dropped as too slow where another's accuracy was higher after so many times fewer rounds."""
REACHED, SLOWER, BEHIND, DIVERGED, LIMIT = (
    "reached",
    "cannot win any more",
    "far behind",
    "diverged",
    "out of rounds",
)


@dataclass(frozen=True)
class Cohorts:
    """Uniform cohorts, each model's of its own size (0: it rests). A model's cohort does not depend on who else is trained."""

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
    """One model in the race: its learning rate (by its place in the grid), its seed, its number among the experiment's tasks.

    `curve` has (round, best accuracy so far) of each test; `rounds` is where that curve crosses the target, None before it has.
    """

    rate: int
    seed: int
    model: int
    rounds: float | None = None
    why: str = ""
    curve: list[tuple[int, float]] = field(default_factory=list)

    @property
    def best(self) -> float:
        return self.curve[-1][1] if self.curve else 0.0

    @property
    def played(self) -> int:
        return self.curve[-1][0] if self.curve else 0

    def level(self, now: float) -> float:
        """The best accuracy of the first `now` rounds."""
        tests = bisect.bisect_right(self.curve, now, key=lambda point: point[0])
        return self.curve[tests - 1][1] if tests else 0.0

    def due(self, now: int, target: float) -> bool:
        """Whether it is tested in this round."""
        return now % SELDOM == 0 or 1 - self.best <= FAR * (1 - target)

    def tested(self, now: int, accuracy: float, target: float) -> None:
        """Take a test in. The curve is made monotonic, and crosses the target on the line between its last two points."""
        if accuracy >= target:
            self.rounds = crossing(
                self.curve[-1] if self.curve else (0, 0.0), (now, accuracy), target
            )
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
    """Run the lanes until each has reached the target or is out. `experiment` and `engine` may hold more tasks: they rest.

    `beat` are the rounds of the best rate so far; the rule against slow rates (LAG) holds from round `lag_from` on.
    """
    names = experiment.names
    sizes = [0] * len(names)
    experiment = replace(
        experiment, rounds=limit + 1, evaluate=limit + 2, target=None
    )  # tests are made here, of those who need one
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
        stop(
            (lane for lane in running if not record["models"][names[lane.model]]["trained"]),
            DIVERGED,
        )
        examine(
            engine,
            state.models,
            [lane for lane in running if not lane.why and lane.due(now, target)],
            now,
            target,
        )
        judge(lanes, now, target, beat, lag=now >= lag_from)
        if watch:
            watch(now)
    stop(lanes, LIMIT)


def examine(
    engine: Engine, models: list[Model], lanes: list[Lane], now: int, target: float
) -> None:
    """Test some models, all in one pass."""
    for lane, score in zip(
        lanes, engine.evaluate(models, [lane.model for lane in lanes]), strict=True
    ):
        lane.tested(now, score.accuracy, target)


def stop(lanes: Iterable[Lane], why: str) -> None:
    """Take lanes out of the race that are not out yet."""
    for lane in lanes:
        lane.why = lane.why or why


def judge(lanes: list[Lane], now: int, target: float, beat: float, lag: bool) -> None:
    """Take the rates out that cannot win: judged over all seeds of a rate together."""
    rates = by_rate(lanes)
    beat = min(
        [beat, *(found for mine in rates.values() if (found := mean_rounds(mine)) is not None)]
    )
    ahead = max(_level(mine, now / LAG, target) for mine in rates.values())
    for mine in rates.values():
        if any(lane.why == DIVERGED for lane in mine):
            stop(mine, DIVERGED)
        elif (
            float(np.mean([now if lane.rounds is None else lane.rounds for lane in mine])) >= beat
        ):  # none left needs less than `now`
            stop(mine, SLOWER)
        elif lag and _level(mine, now, target) < ahead:
            stop(mine, BEHIND)


def _level(lanes: list[Lane], now: float, target: float) -> float:
    return float(np.mean([min(lane.level(now), target) for lane in lanes]))


def by_rate(lanes: list[Lane]) -> dict[int, list[Lane]]:
    """The lanes of each learning rate, in the rates' order."""
    return {
        rate: [lane for lane in lanes if lane.rate == rate]
        for rate in sorted({lane.rate for lane in lanes})
    }


def mean_rounds(lanes: list[Lane]) -> float | None:
    """The mean over seeds of the rounds to the target; None unless all have reached it."""
    rounds = [lane.rounds for lane in lanes if lane.rounds is not None]
    return float(np.mean(rounds)) if len(rounds) == len(lanes) else None


def winner(lanes: list[Lane]) -> int:
    """The best rate: with the fewest rounds in the mean over its seeds.

    Where none has all of its seeds at the target, the one with most of them there, and then with the best accuracy.
    """

    def merit(mine: list[Lane]) -> tuple[float, float, float]:
        rounds = mean_rounds(mine)
        reached = sum(lane.rounds is not None for lane in mine) / len(mine)
        return (
            -math.inf if rounds is None else -rounds,
            reached,
            float(np.mean([lane.best for lane in mine])),
        )

    rates = by_rate(lanes)
    return max(rates, key=lambda rate: merit(rates[rate]))
