"""The kinds of policy: one table, which every other part of rota reads.

A kind is one entry of KINDS. Recipes, checks, checkpoints, `rota list`, descriptions and reports
read the table, so a new kind is a file with its members and one line here.

The loop calls samplers, estimators, servers and availability at their own places in a round. A
policy of any kind may also observe rounds (`observe`) and watch the stream of updates (Watching).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

from rota.admission import Admission
from rota.arrays import Array
from rota.channel import CHANNELS
from rota.estimate import ESTIMATORS, SERVERS
from rota.grouping import GROUPINGS
from rota.personal import PERSONALS, begin_personal
from rota.plan import COLUMNS, Chunk, Job, Model, Plan, Seen, State
from rota.sampling import SAMPLERS
from rota.submodel import CAPACITIES, SUBMODELS
from rota.submodel.tasks import begin_submodel
from rota.world.availability import Availability
from rota.world.devices import DEVICES
from rota.world.drift import Drift

if TYPE_CHECKING:
    from rota.experiment import Experiment

__all__ = ["KINDS", "Kind", "Observing", "Opening", "Watching", "sees"]

P = TypeVar("P")
EVERYTHING = frozenset({*COLUMNS, "update"})


@runtime_checkable
class Watching(Protocol):
    """A policy that needs the updates themselves: it gets each admitted chunk as it passes."""

    def watch(self, state: State, job: Job) -> Any:
        """What is gathered during a round; empty at first."""

    def see(self, watched: Any, job: Job, chunk: Chunk) -> None:
        """Take one chunk in. The chunk's memory must not be kept, only copies of parts of it."""

    def learn(self, state: State, watched: Any) -> State:
        """The state after the last chunk, before `observe`."""


@runtime_checkable
class Observing(Protocol):
    """A policy that learns from what the server saw of each row."""

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        """The state after the round; `shares` are those that the plan was drawn by."""


_SPEAKS: dict[tuple[type, type], bool] = {}


def speaks(policy: object, protocol: type[P]) -> TypeGuard[P]:
    """Whether a policy has a protocol's methods: isinstance, which is slow here, once per class."""
    key = type(policy), protocol
    if key not in _SPEAKS:
        _SPEAKS[key] = isinstance(policy, protocol)
    return _SPEAKS[key]


def sees(policy: object) -> Collection[str]:
    """What a policy learns about single rows; a policy that does not say learns everything."""
    return getattr(policy, "sees", EVERYTHING)


@dataclass(frozen=True)
class Opening:
    """What a policy's first state is made from."""

    experiment: Experiment
    models: list[Model]
    shares: Array
    rounds: int


@dataclass(frozen=True)
class Kind:
    """A kind of policy: its key in recipes, its members by name, and the name of the default one.

    `methods` are what a member must have. `begin` makes a member's state before the first round. A
    kind with one member is a table of options without a name in recipes.
    """

    name: str
    members: Mapping[str, type]
    default: str
    methods: tuple[str, ...] = ()
    begin: Callable[[Any, Opening], State] = lambda policy, at: {}
    usual: str = ""
    """The member that reports need not mention."""
    about: Literal["clients", "models", "shares"] = "clients"
    """What its state belongs to; it begins again when a grouping changes that (grouping/)."""

    @property
    def single(self) -> bool:
        """Whether there is only one member, so that no name is needed."""
        return len(self.members) == 1

    def make(self) -> Any:
        """The default member with its default options."""
        return self.members[self.default]()


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "sampler",
            SAMPLERS,
            "uniform",
            ("init", "draw"),
            lambda sampler, at: sampler.init(at.shares, at.rounds),
            about="shares",
        ),
        Kind(
            "estimator",
            ESTIMATORS,
            "unbiased",
            ("init", "begin", "add", "finish"),
            lambda estimator, at: estimator.init([model.weights for model in at.models], at.shares),
            about="shares",
        ),
        Kind("server", SERVERS, "sgd", ("step",), about="models"),
        Kind("devices", DEVICES, "lognormal", ("profile",), usual="lognormal"),
        Kind(
            "availability",
            {"availability": Availability},
            "availability",
            ("init", "step"),
            lambda availability, at: availability.init(at.shares.shape[1]),
        ),
        Kind(
            "capacity",
            CAPACITIES,
            "whole",
            ("init", "widths", "observe"),
            lambda capacity, at: capacity.init(at.shares, at.experiment.seed),
            usual="whole",
            about="models",
        ),
        Kind(
            "submodel",
            SUBMODELS,
            "invariant",
            ("init", "keep"),
            begin_submodel,
            usual="invariant",
            about="models",
        ),
        Kind(
            "grouping",
            GROUPINGS,
            "one",
            ("init", "regroup"),
            lambda grouping, at: grouping.init(at.shares),
            usual="one",
        ),
        Kind("drift", {"drift": Drift}, "drift", ("phase", "data")),
        Kind("personal", PERSONALS, "none", ("train", "own"), begin_personal, usual="none"),
        Kind("channel", CHANNELS, "none", ("encode", "decode", "nbytes"), usual="none"),
        Kind(
            "admission",
            {"admission": Admission},
            "admission",
            ("init", "limit"),
            lambda admission, at: admission.init(len(at.models)),
            about="models",
        ),
    )
}
