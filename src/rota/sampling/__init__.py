"""Who trains: samplers. A new one is one file with a frozen dataclass, and one line in SAMPLERS."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from rota.arrays import Array
from rota.plan import Plan, Question, Seen, State
from rota.sampling import draw, variance
from rota.sampling.avare import Avare
from rota.sampling.choice import CpowD, PowD, RpowD
from rota.sampling.clustered import ClusteredSimilarity, ClusteredSize
from rota.sampling.divfl import DivFl
from rota.sampling.kvib import KVib, KVibFull
from rota.sampling.mabs import Mabs
from rota.sampling.mmfl import Gvr, KVibPairs, Lvr, Vre
from rota.sampling.mmfl_baselines import FedFair, Random, RoundRobin, RoundRobinServer
from rota.sampling.ocs import Aocs, Ocs
from rota.sampling.optimal import Optimal
from rota.sampling.osmd import Osmd, OsmdAdaptive, OsmdIndependent
from rota.sampling.proportional import Proportional, ProportionalMean
from rota.sampling.uniform import Full, Uniform
from rota.sampling.vrb import Vrb
from rota.sampling.waterfill import waterfill

__all__ = [
    "SAMPLERS",
    "Aocs",
    "Asking",
    "Avare",
    "ClusteredSimilarity",
    "ClusteredSize",
    "CpowD",
    "DivFl",
    "FedFair",
    "Full",
    "Gvr",
    "KVib",
    "KVibFull",
    "KVibPairs",
    "Lvr",
    "Mabs",
    "Ocs",
    "Optimal",
    "Osmd",
    "OsmdAdaptive",
    "OsmdIndependent",
    "PowD",
    "Proportional",
    "ProportionalMean",
    "Random",
    "RoundRobin",
    "RoundRobinServer",
    "RpowD",
    "Sampler",
    "Uniform",
    "Vrb",
    "Vre",
    "asks",
    "draw",
    "variance",
    "waterfill",
]


class Sampler(Protocol):
    """Decides which pairs (model, client) train. A value: all that it learns is in the state it takes and returns.

    `shares` is d[s, i], client i's share of model s's data: 0 where it has none, or cannot be reached in this round. rota's own
    samplers say of themselves, as class attributes, whether they are `unbiased`, what they need (`needs`) and what that `costs`, in
    words for people. One with `updates = True` is shown the updates themselves in `Seen`. Those that draw by a matrix of `rates`
    (state, shares) have it as a method, and where every model draws by itself `procedure` says how.
    """

    def init(self, shares: Array, rounds: int) -> State:
        """The state before the first of so many rounds; raises BadInput where the sampler cannot serve these clients."""

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        """This round's plan."""

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        """The state after the round, from what the server saw of each row; `shares` are those that were drawn by."""


@runtime_checkable
class Asking(Protocol):
    """A sampler that asks some clients before it draws. What they do to answer is charged to the run."""

    def ask(self, state: State, shares: Array, generator: np.random.Generator) -> Question:
        """What it wants to know."""

    def hear(self, state: State, plan: Plan, seen: Seen) -> State:
        """The state with the answers in it, for `draw` and `observe`; `plan` are the rows that were asked."""


def asks(sampler: Sampler, shares: Array, rounds: int) -> str | None:
    """What a sampler asks before its first draw, if it asks all clients of the models that it asks of; None for any other."""
    if not isinstance(sampler, Asking):
        return None
    question = sampler.ask(sampler.init(shares, rounds), shares, np.random.default_rng(0))
    models = np.unique(question.rows.model)
    return question.what if 0 < len(question.rows) == np.count_nonzero(shares[models]) else None


SAMPLERS: dict[str, type[Sampler]] = {
    "uniform": Uniform,
    "full": Full,
    "proportional": Proportional,
    "proportional-mean": ProportionalMean,
    "kvib": KVib,
    "kvib-full": KVibFull,
    "optimal": Optimal,
    "vrb": Vrb,
    "mabs": Mabs,
    "avare": Avare,
    "osmd": Osmd,
    "osmd-adaptive": OsmdAdaptive,
    "osmd-independent": OsmdIndependent,
    "ocs": Ocs,
    "aocs": Aocs,
    "pow-d": PowD,
    "cpow-d": CpowD,
    "rpow-d": RpowD,
    "divfl": DivFl,
    "clustered-size": ClusteredSize,
    "clustered-similarity": ClusteredSimilarity,
    "mmfl-random": Random,
    "mmfl-gvr": Gvr,
    "mmfl-lvr": Lvr,
    "mmfl-vre": Vre,
    "mmfl-kvib": KVibPairs,
    "round-robin": RoundRobin,
    "round-robin-server": RoundRobinServer,
    "fedfair": FedFair,
}
