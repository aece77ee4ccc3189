"""K-Vib's theory on its Synthetic task (section 4 and App. F), and rota's own sampler there.

A part is one seed of one setting: all samplers train on their own updates, and then each of them
draws on the updates that full participation recorded. Further parts are the sweep of learning
rates, the growth of the regret in K, N and T, other federations, and made-up updates. A finished
part is not run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota import data, models, partition
from rota.arrays import Array
from rota.data.federation import Federation
from rota.data.partition import unbalanced
from rota.engine import make
from rota.experiment import Experiment
from rota.plan import Task, whole
from rota.sampling import (
    Avare,
    ClusteredSize,
    Full,
    KVib,
    KVibFull,
    Mabs,
    Optimal,
    Optimistic,
    Osmd,
    OsmdAdaptive,
    Proportional,
    Sampler,
    Uniform,
    Vrb,
    draw,
)
from rota.sampling.waterfill import waterfill
from rota.weights import Weights
from rota_lab.reproduce.kvib_stack import (
    Lane,
    Meter,
    Recorded,
    Stack,
    own_updates,
    shared_updates,
)
from rota_lab.reproduce.parts import Found, chosen, in_time, results, run_parts, start

ROUNDS, BUDGET, BUDGETS = 500, 10, (5, 20)
SETTINGS = {"logits": (0.005, False), "twice": (0.02, True)}
"""The learning rate, and whether softmax is applied twice as in K-Vib's published code."""
RATES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
"""The learning rates of the sweep."""
SEEDS = range(5, 25)
"""rota's sampler was chosen on seeds from 100, and the form of K-Vib's gamma on seeds 0 to 4."""
SWEEP_SEEDS = range(3)
PROCEDURES = {"multinomial": "with replacement", "sequential": "without", "independent": "coins"}
LEARNERS: dict[str, Callable[..., Sampler]] = {
    "vrb": Vrb,
    "mabs": Mabs,
    "avare": Avare,
    "osmd": Osmd,
    "osmd-adaptive": OsmdAdaptive,
    "kvib": KVib,
    "optimistic": Optimistic,
    "proportional": Proportional,
}
POINTS = 25
"""The points of a curve over the rounds."""
ENDS = (31, 62, 125, 250, 500)
"""The rounds after which the regret is looked at, and K-Vib's T where it is varied."""
CLIENTS = (25, 50, 100, 200)
GROWTH_BUDGETS = (5, 10, 20, 40)
BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1)
"""The G of the sensitivity study, with theta = 0.3."""
FEDERATIONS = ("writers-v1", "writers-v2", "writers-v3", "digits", "fashion")
FRACTIONS = (0.05, 0.1, 0.2)
DRAWS = 20
"""The runs of each sampler on one recorded sequence."""
OTHER_ROUNDS = 200
QUICK_ROUNDS, QUICK_SEEDS = 20, range(5, 7)
TERMS = ("uniform-independent", "kvib-independent", "optimistic-independent", "optimal")
EVERY = 25
"""The rounds between two looks at the gradients."""


@dataclass(frozen=True)
class Piece:
    """What a part measures: a setting with a seed, or one of the other studies."""

    study: str
    which: str
    rounds: int = ROUNDS
    quick: bool = False

    @property
    def name(self) -> str:
        return f"{self.study}-{self.which}"

    @property
    def words(self) -> set[str]:
        """What `--only` may call the part."""
        return {self.name, self.study}


def parts(quick: bool = False) -> list[Piece]:
    """All parts, in the order in which they run."""
    seeds, rounds = (QUICK_SEEDS, QUICK_ROUNDS) if quick else (SEEDS, ROUNDS)
    out = [Piece(name, f"seed{seed}", rounds, quick) for name in SETTINGS for seed in seeds]
    out += [Piece("sweep", f"seed{seed}", rounds, quick) for seed in SWEEP_SEEDS[: len(seeds)]]
    out += [Piece("growth", f"N{n}", rounds, quick) for n in CLIENTS]
    out += [Piece("made", name, rounds, quick) for name in MADE]
    if not quick:
        out += [Piece("other", name, OTHER_ROUNDS) for name in FEDERATIONS]
    return out


SECONDS = {"logits": 90, "twice": 100, "sweep": 60, "growth": 40, "made": 30, "other": 120}
"""The rough times of parts on one core."""


def estimate(only: str | None = None) -> list[str]:
    """How much work the parts are, as lines."""
    some = chosen(only, parts())
    lines = [f"{part.name:20}{part.rounds:4} rounds{SECONDS[part.study]:5} s" for part in some]
    minutes = sum(SECONDS[part.study] for part in some) / 60
    return [*lines, "", f"{len(some)} parts, roughly {minutes:.0f} minutes of one core"]


def work(
    quick: bool = False,
    *,
    out: Path | None = None,
    only: str | None = None,
    minutes: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Found]:
    """Run the unfinished parts, and return all that are finished, in their order."""
    wanted = parts(quick=True) if quick else chosen(only, parts())
    files = [] if quick else results(out, "kvib-theory")
    everything = [part.name for part in parts(quick)]
    runner = start(files, everything, minutes, "cpu", "fp32", say)

    def load(_: str) -> Federation:
        return data.synthetic_kvib()

    def measure(federation: Federation, part: Piece) -> tuple[Found, str]:
        found = STUDIES[part.study](part, federation, runner.deadline)
        return asdict(part) | found, "finished"

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the products are small
    try:
        run_parts(runner, wanted, lambda part: "", load, measure)
    finally:
        torch.set_num_threads(threads)
    return {name: runner.found[name] for name in everything if name in runner.found}


# --- the samplers


def main_lanes(rate: float) -> list[Lane]:
    """Every sampler at K = 10, by every procedure that it has; the first lane is recorded."""
    lanes = [Lane("full", Full(), rate)]
    for procedure in ("fixed", "multinomial", "independent"):
        lanes.append(Lane(f"uniform-{procedure}", Uniform(BUDGET, procedure), rate))
    for learner, make_one in LEARNERS.items():
        for procedure in PROCEDURES:
            sampler = make_one(budget=BUDGET, procedure=procedure)
            lanes.append(Lane(f"{learner}-{procedure}", sampler, rate))
    lanes.append(Lane("clustered-size", ClusteredSize(BUDGET), rate))
    lanes.append(Lane("kvib-full", KVibFull(BUDGET), rate))
    return [*lanes, Lane("optimal", Optimal(BUDGET), rate)]


def budget_lanes(rate: float, budgets: tuple[int, ...] = BUDGETS) -> list[Lane]:
    """The unbiased samplers that need no more than the drawn clients' norms, at other budgets."""
    lanes = []
    for budget in budgets:
        some: dict[str, Sampler] = {
            "uniform-fixed": Uniform(budget),
            "proportional-independent": Proportional(budget, "independent"),
            "clustered-size": ClusteredSize(budget),
            "optimal": Optimal(budget),
        }
        for learner in ("vrb", "mabs", "avare", "osmd", "osmd-adaptive", "kvib", "optimistic"):
            own = ("independent",) if learner in ("kvib", "optimistic") else ("multinomial",)
            more = ("independent",) if learner == "avare" else ()
            for procedure in (*own, *more):
                some[f"{learner}-{procedure}"] = LEARNERS[learner](
                    budget=budget, procedure=procedure
                )
        lanes += [Lane(f"{name}-K{budget}", sampler, rate) for name, sampler in some.items()]
    return lanes


def more_lanes(recorded: Recorded) -> list[Lane]:
    """What is tried on the recorded updates alone: Avare's starts, and G by one rule for all."""
    largest = float(np.max(recorded.scores))
    lanes = []
    for procedure in ("multinomial", "independent"):
        avare = Avare(BUDGET, procedure)
        lanes.append(Lane(f"avare-zero-{procedure}", avare, start=np.zeros_like))
        lanes.append(Lane(f"avare-pass-{procedure}", avare, start=np.copy))
    for part in (1.0, 0.1, 0.01):
        bound = largest * part
        lanes.append(Lane(f"kvib-largest-{part:g}", KVib(BUDGET, bound=bound)))
        lanes.append(Lane(f"vrb-largest-{part:g}", Vrb(BUDGET, bound=bound)))
    for bound in BOUNDS:
        lanes.append(Lane(f"kvib-G{bound:g}", KVib(BUDGET, theta=0.3, bound=bound)))
    return [*lanes, Lane("kvib-theta", KVib(BUDGET, theta=0.3))]


# --- the studies


def setting(part: Piece, federation: Federation, deadline: float) -> Found:
    """One seed of a setting: own updates, then the recorded ones of full participation."""
    rate, twice = SETTINGS[part.study]
    lanes = main_lanes(rate) + budget_lanes(rate)
    if part.quick:
        lanes = [lane for lane in main_lanes(rate) if "sequential" not in lane.name]
    seed = int(part.which.removeprefix("seed"))
    stack = Stack(federation, [lane.lr for lane in lanes], seed, twice)
    terms = Terms(stack, [lane.name for lane in lanes])
    meters, weights, recorded = own_updates(stack, lanes, part.rounds, deadline, terms.look)
    own = summary(meters)
    for name, tested in zip(own, stack.tested(weights), strict=True):
        own[name] |= {key: finite(value) for key, value in tested.items()}
    again, shared = lanes[1:] + more_lanes(recorded), list[Meter]()
    for lane in again:
        in_time(deadline)
        shared.append(shared_updates(lane, stack.shares, recorded, seed))
    return {
        "own": own,
        "shared": summary(shared),
        "over time": over_time(shared, recorded),
        "lemma 2": lemma_2(recorded),
        "terms": terms.means(meters),
    }


def summary(meters: list[Meter]) -> dict[str, dict[str, Any]]:
    """Sums over the rounds by lane, and a curve for the lanes at K = 10."""
    out = dict[str, dict[str, Any]]()
    for meter in meters:
        name = meter.lane.name
        out[name] = {key: finite(value) for key, value in meter.totals().items()}
        if name in CURVES:
            out[name]["curve"] = meter.curve(POINTS)
    return out


CURVES = {
    "uniform-fixed",
    "vrb-multinomial",
    "mabs-multinomial",
    "avare-multinomial",
    "avare-independent",
    "osmd-multinomial",
    "kvib-independent",
    "kvib-full",
    "optimistic-independent",
    "optimal",
}
"""The lanes that the charts over the rounds show."""


def finite(value: float) -> float | None:
    """A number as JSON has it, with seven digits; None if a run has diverged."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


def over_time(meters: list[Meter], recorded: Recorded) -> dict[str, Any]:
    """Eq. 7 after some rounds: sum l(p), the best fixed p's sum, and the sum of the least l."""
    scores = np.array(recorded.scores)
    ends = [end for end in ENDS if end <= len(scores)]
    squares = np.cumsum(scores**2, axis=0)
    fixed = [best_cost(np.sqrt(squares[end - 1]), BUDGET) for end in ends]
    out: dict[str, Any] = {"ends": ends, "fixed": fixed}
    for meter in meters:
        if meter.lane.name in CURVES and meter.cost:
            cost = np.cumsum(meter.cost)
            out[meter.lane.name] = [float(cost[end - 1]) for end in ends]
            out["least"] = [float(np.sum(meter.best[:end])) for end in ends]
    return out


def best_cost(scores: Array, budget: float) -> float:
    """The least l(p) over p <= 1, sum p = budget."""
    some = scores > 0
    return float((scores[some] ** 2 / waterfill(scores, budget)[some]).sum())


def lemma_2(recorded: Recorded) -> dict[str, float]:
    """Eq. 3's and eq. 4's bounds for uniform p, and the exact variances of the two procedures."""
    scores, total = np.array(recorded.scores), np.array(recorded.total)
    clients = scores.shape[1]
    coins = (clients / BUDGET - 1) * (scores**2).sum(axis=1)
    factor = (clients - BUDGET) / (BUDGET * (clients - 1))
    fixed = factor * (clients * (scores**2).sum(axis=1) - total**2)
    bound = factor * clients * (scores**2).sum(axis=1)
    return {
        "bound": float(bound.sum()),
        "fixed": float(fixed.sum()),
        "coins": float(coins.sum()),
        "fixed is below coins": float((fixed < coins).mean()),
        "late bound": float(bound[len(bound) // 2 :].sum()),
        "late fixed": float(fixed[len(bound) // 2 :].sum()),
    }


class Terms:
    """Theorem 13's terms along some runs: what one step gains and loses by the descent lemma.

    E f(x - d) <= f(x) - <grad f, D> + L / 2 (|D|^2 + variance), where D is the full update and only
    the variance depends on the sampler.
    """

    def __init__(self, stack: Stack, names: list[str]) -> None:
        self.stack = stack
        self.lanes = [names.index(name) for name in TERMS if name in names]
        self.rows: dict[int, list[dict[str, float]]] = {lane: [] for lane in self.lanes}
        d = stack.shares[0]
        moment = sum(w * (x.T @ x / len(x)).double() for w, x in zip(d, stack.x, strict=True))
        # softmax's Hessian is at most 1/2
        self.smooth = float(torch.linalg.eigvalsh(moment)[-1]) / 2

    def look(self, now: int, weights: Tensor, whole: Tensor) -> None:
        """Take the terms of a round, from the models before it and the full updates."""
        if (now - 1) % EVERY:
            return
        d = self.stack.shares[0]
        for lane in self.lanes:
            losses, slopes = self.stack.gradients(weights[:, :, lane])
            slope = np.tensordot(d, slopes, axes=1)
            full = whole[:, :, lane].double().numpy()
            apart = ((slopes - slope) ** 2).sum(axis=(1, 2))
            self.rows[lane].append(
                {
                    "round": now,
                    "loss": float(d @ losses),
                    "gradient": float((slope**2).sum()),
                    "between clients": float(d @ apart),
                    "progress": float((slope * full).sum()),
                    "step": float((full**2).sum()) * self.smooth / 2,
                }
            )

    def means(self, meters: list[Meter]) -> dict[str, dict[str, float | None]]:
        """The means over the rounds that were looked at."""
        out = {}
        for lane, rows in self.rows.items():
            meter = meters[lane]
            mine = {
                key: float(np.mean([row[key] for row in rows]))
                for key in ("gradient", "between clients", "progress", "step")
            }
            looked = [int(row["round"]) - 1 for row in rows]
            mine["variance"] = float(np.mean(np.array(meter.variance)[looked])) * self.smooth / 2
            mine["fall"] = (rows[0]["loss"] - rows[-1]["loss"]) / max(looked[-1], 1)
            mine["smooth"] = self.smooth
            out[meter.lane.name] = {key: finite(value) for key, value in mine.items()}
        return out


def sweep(part: Piece, federation: Federation, deadline: float) -> Found:
    """Learning rates on logits at K = 5, where the noise is largest."""
    samplers: dict[str, Callable[[], Sampler]] = {
        "uniform": lambda: Uniform(5),
        "mabs": lambda: Mabs(5),
        "osmd": lambda: Osmd(5),
        "kvib": lambda: KVib(5),
        "full": Full,
    }
    lanes = [Lane("recorded", Full(), 0.0)]
    for rate in RATES:
        lanes += [Lane(f"{name}-{rate:g}", one(), rate) for name, one in samplers.items()]
    seed = int(part.which.removeprefix("seed"))
    stack = Stack(federation, [lane.lr for lane in lanes], seed, False)
    meters, weights, _ = own_updates(stack, lanes, part.rounds, deadline)
    own = summary(meters)
    for name, tested in zip(own, stack.tested(weights), strict=True):
        own[name] |= {key: finite(value) for key, value in tested.items()}
    return {"own": own}


def growth(part: Piece, _: Federation, deadline: float) -> Found:
    """K-Vib's static regret over T, and over K, on updates of N clients of Synthetic(0, 0).

    G is the largest pi of the sequence, as Theorem 8 needs it, and the regret is in units of G^2.
    """
    clients = int(part.which.removeprefix("N"))
    rate, twice = SETTINGS["logits"]
    stack = Stack(data.synthetic(0.0, 0.0, clients=clients), [rate], 0, twice)
    lanes = [Lane("full", Full(), rate)]
    recorded = own_updates(stack, lanes, part.rounds, deadline)[2]
    ends = [end for end in ENDS if end <= part.rounds] or [part.rounds]
    draws = 2 if part.quick else DRAWS
    out: dict[str, Any] = {"T": {}, "K": {}}
    for end in ends:
        out["T"][str(end)] = static(recorded, stack.shares, end, BUDGET, draws)
    for budget in GROWTH_BUDGETS:
        if budget < clients and not (clients != 100 and budget != BUDGET):
            out["K"][str(budget)] = static(recorded, stack.shares, ends[-1], budget, draws)
    return out


def static(recorded: Recorded, shares: Array, end: int, budget: int, draws: int) -> list[float]:
    """K-Vib's static regret (eq. 7) after `end` rounds, by draw, in units of G^2."""
    first = recorded.first(end)
    scores = np.array(first.scores)
    largest = float(scores.max())
    fixed = best_cost(np.sqrt((scores**2).sum(axis=0)), budget)
    out = []
    for seed in range(draws):
        meter = shared_updates(
            Lane("kvib", KVib(budget, bound=largest)), shares, first, SEEDS[0] + seed
        )
        out.append((float(np.sum(meter.cost)) - fixed) / largest**2)
    return out


def rivals(budget: int) -> list[Lane]:
    """The samplers that other federations compare."""
    samplers: dict[str, Sampler] = {
        "uniform-fixed": Uniform(budget),
        "uniform-independent": Uniform(budget, "independent"),
        "proportional-independent": Proportional(budget, "independent"),
        "avare-multinomial": Avare(budget),
        "avare-independent": Avare(budget, "independent"),
        "kvib-independent": KVib(budget),
        "optimistic-independent": Optimistic(budget),
        "optimal": Optimal(budget),
    }
    return [Lane(name, sampler) for name, sampler in samplers.items()]


def on_recorded(
    shares: Array, recorded: Recorded, draws: int, deadline: float
) -> dict[str, dict[str, list[float]]]:
    """Cumulative variances by budget, sampler and draw."""
    clients, out = shares.shape[1], dict[str, dict[str, list[float]]]()
    for fraction in FRACTIONS:
        budget = max(2, round(fraction * clients))
        out[str(budget)] = {}
        for lane in rivals(budget):
            in_time(deadline)
            learns = hasattr(lane.sampler, "observe")
            totals = []
            for seed in range(draws if learns else 1):
                meter = shared_updates(lane, shares, recorded, SEEDS[0] + seed)
                totals.append(float(np.sum(meter.variance)))
            out[str(budget)][lane.name] = totals if learns else totals * draws
    return out


def other(part: Piece, _: Federation, deadline: float) -> Found:
    """Another federation's updates under full participation, and the samplers on them."""
    task = TASKS[part.which]()
    experiment = Experiment([task], Full(), rounds=part.rounds, seed=SEEDS[0])
    engine = make("auto", experiment, "cpu")
    shares, (model,), recorded = experiment.shares, engine.initial(), Recorded()
    for now in range(1, part.rounds + 1):
        in_time(deadline)
        plan, scores = draw.everybody(shares), np.zeros(shares.shape[1])
        full = torch.zeros_like(model.params)
        for chunk in engine.train(whole([model], plan, now)):
            d = plan.weight[chunk.rows]
            scores[plan.client[chunk.rows]] = d * chunk.norm
            full += torch.from_numpy(d).to(full) @ chunk.update
        recorded.add(scores, float(full.norm()), None)
        model = replace(model, weights=Weights(model.params - full, model.weights.buffers))
    (score,) = engine.evaluate([model])
    found = on_recorded(shares, recorded, DRAWS, deadline)
    return {"clients": shares.shape[1], "budgets": found, "accuracy": score.accuracy}


TASKS: dict[str, Callable[[], Task]] = {
    f"writers-v{version}": partial(
        lambda version: Task(
            models.logistic,
            data.mnist_writers(unbalanced(version), seed=0),
            lr=0.01,
            batch=20,
            epochs=3,
        ),
        version,
    )
    for version in (1, 2, 3)
} | {
    "digits": lambda: Task(
        models.two_nn,
        data.digits(partition=partition.dirichlet(clients=50, alpha=0.3), seed=0),
        lr=0.05,
        batch=10,
    ),
    "fashion": lambda: Task(
        models.logistic,
        data.fashion_mnist(partition=partition.shards(clients=100), seed=0),
        lr=0.01,
        batch=64,
        steps=5,
    ),
}


def made(part: Piece, federation: Federation, deadline: float) -> Found:
    """Updates that are made up to find where rota's sampler fails, with Synthetic's shares."""
    sizes = federation.roster.sizes.astype(np.float64)
    shares = (sizes / sizes.sum())[None]
    norms, recorded = MADE[part.which], Recorded()
    for now, norm in enumerate(norms(shares[0], part.rounds), start=1):
        if now > part.rounds:
            break
        recorded.add(shares[0] * norm, 0.0, None)
    draws = 2 if part.quick else DRAWS
    return {"budgets": on_recorded(shares, recorded, draws, deadline)}


def inverse(shares: Array, rounds: int) -> Iterator[Array]:
    """Clients with little data have large updates, so that all x_i are equal."""
    for _ in range(rounds):
        yield 1 / shares


def waking(shares: Array, rounds: int) -> Iterator[Array]:
    """A tenth of the clients sends updates of almost 0 until the middle of the run."""
    norm = np.ones(len(shares))
    asleep = np.argsort(-shares)[: len(shares) // 10]
    for now in range(rounds):
        norm[asleep] = 1e-6 if now < rounds // 2 else 1.0
        yield norm.copy()


def noisy(shares: Array, rounds: int) -> Iterator[Array]:
    """Norms that say nothing about the next round's."""
    stream = np.random.default_rng(0)
    for _ in range(rounds):
        yield stream.lognormal(0, 1, len(shares))


MADE: dict[str, Callable[[Array, int], Iterator[Array]]] = {
    "inverse": inverse,
    "waking": waking,
    "noisy": noisy,
}
STUDIES: dict[str, Callable[[Piece, Federation, float], Found]] = {
    "logits": setting,
    "twice": setting,
    "sweep": sweep,
    "growth": growth,
    "made": made,
    "other": other,
}
