"""From updates to new models: estimators, and the server optimisers that apply their estimates."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from rota.arrays import Array
from rota.estimate.average import Estimate, FedAvg, Unbiased
from rota.estimate.memory import Tensors
from rota.estimate.scaffold import Scaffold
from rota.estimate.server import Adam, Server, Sgd, Yogi
from rota.estimate.stale import FedStale, FedVarp, Mifa, StaleVr, StaleVre
from rota.plan import Chunk, Local, Plan
from rota.weights import Weights

__all__ = [
    "ESTIMATORS",
    "SERVERS",
    "Adam",
    "Correcting",
    "Estimate",
    "Estimator",
    "Expecting",
    "FedAvg",
    "FedStale",
    "FedVarp",
    "Fitting",
    "Mifa",
    "Recalling",
    "Scaffold",
    "Server",
    "Sgd",
    "StaleVr",
    "StaleVre",
    "Tensors",
    "Unbiased",
    "Yogi",
]


class Estimator(Protocol):
    """Turns the stream of chunks into one estimate per model.

    An estimator is a value: its memories are in the state that it takes and returns. `sees` says
    what it learns of single rows: {"update"}, or nothing if it needs only weighted sums.
    """

    def init(self, models: list[Weights], shares: Array) -> Tensors:
        """The state before the first round; `shares` is d[s, i], client i's share of model s."""

    def begin(self, state: Tensors, models: list[Weights], plan: Plan) -> Any:
        """Empty sums for one round."""

    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> Array | None:
        """Add one chunk to the sums; returns the norms of what is weighed, if not the updates."""

    def finish(self, state: Tensors, sums: Any) -> tuple[list[Estimate], Tensors]:
        """Each model's estimate, and the state after the round."""


@runtime_checkable
class Recalling(Protocol):
    """An estimator that weighs differences from remembered updates; samplers see their norms."""

    @property
    def numbers(self) -> int:
        """How many numbers a client sends to report its norm: more than 1 if it adds others."""

    def residual(self, state: Tensors, plan: Plan, chunk: Chunk) -> tuple[Array, Tensors]:
        """The norms of what would be weighed, for each row of a chunk, and the new state.

        The updates are known before the draw, so they may change how the state weighs them. The
        plan's weights are the shares of the round.
        """


@runtime_checkable
class Fitting(Recalling, Protocol):
    """An estimator whose `residual` learns from the clients that answer before the draw."""

    def stand_in(self, before: Tensors, after: Tensors, factor: Array) -> Tensors:
        """The state after the answers, where some clients gave none and others count for them.

        What model s's clients taught counts factor[s] times.
        """


@runtime_checkable
class Expecting(Protocol):
    """An estimator that predicts, without asking, how far updates differ from remembered ones."""

    def expected(self, state: Tensors, rows: Plan) -> Array:
        """The expected norms of what is weighed; NaN where nothing is known."""


@runtime_checkable
class Correcting(Protocol):
    """An estimator with a say in local work: where rows start, what pulls or shifts their steps.

    One with `plain_sgd = True` is refused where a task has momentum or another local optimiser.
    """

    @property
    def controls(self) -> int:
        """How many vectors of the model's size travel each way with every row and its model."""

    def local(self, state: Tensors, models: list[Weights], plan: Plan) -> Local:
        """The vectors of the plan's local work; `models` are the models that the rows fetch."""


ESTIMATORS: dict[str, type[Estimator]] = {
    "unbiased": Unbiased,
    "fedavg": FedAvg,
    "fedvarp": FedVarp,
    "fedstale": FedStale,
    "stale-vr": StaleVr,
    "stale-vre": StaleVre,
    "mifa": Mifa,
    "scaffold": Scaffold,
}
SERVERS: dict[str, type[Server]] = {"sgd": Sgd, "adam": Adam, "yogi": Yogi}
