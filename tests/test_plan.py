"""The nouns of a round: some rows of a thing are those rows, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rota.arrays import Array
from rota.plan import (
    COLUMNS,
    NO_REPLY,
    Chunk,
    Costs,
    Duty,
    Job,
    Local,
    Model,
    Plan,
    Seen,
    duty,
)
from rota.policies import EVERYTHING, KINDS, sees
from rota.submodel.cut import SubModel
from rota.weights import Weights

MOST = 6
PARAMS, BUFFERS = 4, 2


def column(draw: st.DrawFn, rows: int, kind: Any = np.float64) -> Array:
    whole = st.integers(0, 100)
    numbers = whole if kind is np.int64 else whole.map(lambda number: number / 8)
    return draw(hnp.arrays(kind, rows, elements=numbers))


@st.composite
def all_costs(draw: st.DrawFn, rows: int) -> Costs:
    whole = (column(draw, rows, np.int64) for _ in range(2))
    return Costs(column(draw, rows), column(draw, rows), *whole)


@st.composite
def plans(draw: st.DrawFn, rows: int, models: int = 2, cut: bool = False) -> Plan:
    client = column(draw, rows, np.int64)
    model = draw(hnp.arrays(np.int64, rows, elements=st.integers(0, models - 1)))
    plan = Plan(client, model, column(draw, rows), column(draw, rows))
    if not cut:
        return plan
    held = draw(hnp.arrays(np.int64, rows, elements=st.integers(0, 1)))
    part = SubModel(0, 0.5, 0.5, cut=None)  # type: ignore[arg-type]
    return replace(plan, cut=held, cuts=(part,))


@st.composite
def chunks(draw: st.DrawFn, rows: int, places: Array | None = None) -> Chunk:
    """A reply for rows of a plan; some rows failed, and some of these could not train at all."""
    places = draw(st.permutations(range(rows)).map(np.array)) if places is None else places
    number = len(places)
    update = torch.from_numpy(column(draw, number * PARAMS, np.float32).reshape(number, PARAMS))
    buffers = torch.from_numpy(column(draw, number * BUFFERS, np.float32).reshape(number, BUFFERS))
    reason = draw(
        st.lists(st.sampled_from(["", "", "it failed"]), min_size=number, max_size=number)
    )
    steps = draw(hnp.arrays(np.int64, number, elements=st.integers(0, 3)))
    steps[[not why for why in reason]] += 1
    chunk = Chunk(
        rows=np.asarray(places, np.int64),
        model=0,
        now=3,
        lr=0.1,
        update=update,
        buffers=buffers,
        loss=column(draw, number),
        steps=steps,
        examples=column(draw, number, np.int64),
        costs=draw(all_costs(number)),
        reason=reason,
    )
    known = draw(st.sampled_from(["no norms", "norms", "norms of another update"]))
    if known != "no norms":
        told = update if known == "norms" else update.clone()
        chunk = replace(chunk, measured=(told, np.arange(100.0, 100.0 + number)))
    return chunk


@st.composite
def with_places(
    draw: st.DrawFn, make: Callable[[int], st.SearchStrategy[Any]]
) -> tuple[Any, Array, Array]:
    """A thing of some rows; some of these in any order; and some of those, again."""
    rows = draw(st.integers(1, MOST))
    some = draw(st.lists(st.integers(0, rows - 1), max_size=MOST, unique=True))
    few = (
        st.lists(st.integers(0, len(some) - 1), max_size=MOST, unique=True) if some else st.just([])
    )
    return draw(make(rows)), np.array(some, np.int64), np.array(draw(few), np.int64)


def columns(thing: Any) -> dict[str, Any]:
    return {each.name: getattr(thing, each.name) for each in fields(thing)}


@given(drawn=with_places(all_costs))
def test_some_costs(drawn: tuple[Costs, Array, Array]) -> None:
    costs, some, few = drawn
    part = costs.of(some)
    for name, values in columns(costs).items():
        np.testing.assert_array_equal(getattr(part, name), values[some])
        np.testing.assert_array_equal(getattr(part.of(few), name), values[some[few]])
        assert getattr(part, name).dtype == values.dtype


@given(drawn=with_places(lambda rows: plans(rows, cut=True)))
def test_some_rows_of_a_plan(drawn: tuple[Plan, Array, Array]) -> None:
    plan, some, few = drawn
    part = plan.of(some).of(few)
    assert len(part) == len(few)
    for name in ("client", "model", "probability", "weight", "cut"):
        np.testing.assert_array_equal(getattr(part, name), getattr(plan, name)[some[few]])
    for row, place in enumerate(some[few].tolist()):
        assert part.held(row) is plan.held(place)
    assert replace(plan, cut=None, cuts=()).of(some).cut is None


@given(drawn=with_places(chunks))
def test_some_rows_of_a_chunk(drawn: tuple[Chunk, Array, Array]) -> None:
    chunk, some, few = drawn
    part = chunk.of(some)
    assert (part.model, part.now, part.lr) == (chunk.model, chunk.now, chunk.lr)
    for name in ("rows", "update", "buffers", "loss", "steps", "examples"):
        np.testing.assert_array_equal(getattr(part, name), getattr(chunk, name)[some])
        np.testing.assert_array_equal(getattr(part.of(few), name), getattr(chunk, name)[some[few]])
    for name in columns(chunk.costs):
        np.testing.assert_array_equal(getattr(part.costs, name), getattr(chunk.costs, name)[some])
    assert part.reason == [chunk.reason[place] for place in some.tolist()]
    np.testing.assert_array_equal(part.ok, chunk.ok[some])
    np.testing.assert_allclose(part.norm, chunk.norm[some], rtol=1e-6)
    np.testing.assert_allclose(part.of(few).norm, chunk.norm[some[few]], rtol=1e-6)
    assert chunk.of(np.arange(len(chunk.rows))) is chunk


@given(rows=st.integers(0, MOST), data=st.data())
def test_norms_are_those_of_the_updates_at_hand(rows: int, data: st.DataObject) -> None:
    """Those that an engine measured, unless the update was replaced after it."""
    chunk = data.draw(chunks(rows))
    exact = np.sqrt((chunk.update.numpy().astype(np.float64) ** 2).sum(axis=1))
    told = chunk.measured is not None and chunk.measured[0] is chunk.update
    expected = np.arange(100.0, 100.0 + rows) if told else exact
    np.testing.assert_allclose(chunk.norm, expected, rtol=1e-6)
    doubled = replace(chunk, update=2 * chunk.update)
    np.testing.assert_allclose(doubled.norm, 2 * exact, rtol=1e-6)


MODELS = [Model(task, Weights(torch.zeros(PARAMS), torch.zeros(BUFFERS))) for task in (1, 1, 0)]


def numbered(rows: int) -> Local:
    """Vectors that say which row they are of."""

    def vectors(few: Array) -> torch.Tensor:
        assert few.dtype.kind in "iu"
        assert ((few >= 0) & (few < rows)).all()
        return torch.from_numpy(few)[:, None].expand(-1, PARAMS)

    return Local(
        start=lambda few: Weights(vectors(few) + 10, vectors(few)[:, :BUFFERS] + 10),
        anchor=lambda few: vectors(few) + 20,
        shift=lambda few: vectors(few) + 30,
    )


@st.composite
def jobs(draw: st.DrawFn, rows: int) -> Job:
    plan = draw(plans(rows, models=len(MODELS)))
    work = Duty(
        column(draw, rows), *(column(draw, rows, np.int64) for _ in ("down", "up", "numbers"))
    )
    local = columns(numbered(rows))
    given = {name: draw(st.sampled_from([None, function])) for name, function in local.items()}
    return Job(5, MODELS, plan, work, Local(**given))


@given(drawn=with_places(jobs))
def test_some_rows_of_a_job(drawn: tuple[Job, Array, Array]) -> None:
    """With their duties, and with their own local vectors."""
    job, some, few = drawn
    for part, rows in ((job.of(some), some), (job.of(some).of(few), some[few])):
        assert part.now == job.now
        assert part.models is job.models
        np.testing.assert_array_equal(part.plan.client, job.plan.client[rows])
        np.testing.assert_array_equal(part.task, np.array([1, 1, 0])[job.plan.model[rows]])
        for name, values in columns(job.duty).items():
            np.testing.assert_array_equal(getattr(part.duty, name), values[rows])
        for name, function in columns(job.local).items():
            mine = getattr(part.local, name)
            assert (mine is None) == (function is None)
            if function is not None:
                every = np.arange(len(rows))
                back = every[::-1].copy()
                np.testing.assert_array_equal(first(mine(every)), first(function(rows)))
                np.testing.assert_array_equal(first(mine(back)), first(function(rows[back])))


@given(drawn=with_places(lambda rows: st.just(numbered(rows))))
def test_some_rows_of_local_vectors(drawn: tuple[Local, Array, Array]) -> None:
    local, some, few = drawn
    assert local.of(some).of(few).start is not None
    start, shift = local.of(some).start, local.of(some).of(few).shift
    assert start is not None
    assert shift is not None
    assert start(few).params[:, 0].tolist() == (some[few] + 10).tolist()
    assert start(few).buffers.shape == (len(few), BUFFERS)
    assert shift(np.arange(len(few)))[:, 0].tolist() == (some[few] + 30).tolist()
    assert Local().of(some) == Local()


def first(vectors: Any) -> Array:
    """A start's parameters and buffers side by side, or the vectors themselves."""
    return np.asarray(torch.cat(list(vectors), dim=1) if isinstance(vectors, Weights) else vectors)


@given(plan=plans(4, models=3), down=st.integers(0, 2), up=st.integers(0, 2))
def test_a_duty_counts_models_with_their_buffers_and_controls_without(
    plan: Plan, down: int, up: int
) -> None:
    sizes = [(3, 0), (5, 2), (1, 4)]
    models = [Model(0, Weights(torch.zeros(p), torch.zeros(b))) for p, b in sizes]
    work = duty(models, plan, 0.25, (1, down), (up, 1), numbers=2)
    for row, (params, buffers) in enumerate(sizes[model] for model in plan.model.tolist()):
        model, control = 4 * (params + buffers), 4 * params
        assert work.down[row] == model + down * control
        assert work.up[row] == up * model + control
        assert (work.training[row], work.numbers[row]) == (0.25, 2)


# ---- what was seen


@st.composite
def seen(draw: st.DrawFn, rows: int) -> Seen:
    """After some replies, with rows that failed and rows that have not replied."""
    out = Seen.nothing(rows, pace=column(draw, rows))
    replied = draw(st.lists(st.integers(0, rows - 1), max_size=rows, unique=True)) if rows else []
    out.add(draw(chunks(rows, np.array(replied, np.int64))))
    return out


@given(rows=st.integers(0, MOST), data=st.data(), wanted=st.sets(st.sampled_from([*EVERYTHING])))
def test_only_what_is_declared_is_seen(rows: int, data: st.DataObject, wanted: set[str]) -> None:
    """The other columns say nothing of any row; all of them together are everything."""
    all_of_it = data.draw(seen(rows))
    before = [*map(np.copy, table(all_of_it).values())]
    part = all_of_it.only(wanted)
    nothing = table(Seen.nothing(rows))
    for name, values in table(all_of_it).items():
        column = "seconds" if name in columns(all_of_it.costs) else name
        expected = values if column in wanted else nothing[name]
        np.testing.assert_array_equal(table(part)[name], expected)
    assert part.reason == all_of_it.reason
    assert part.pace is all_of_it.pace
    np.testing.assert_array_equal(part.ok, all_of_it.ok)
    for name, values in table(all_of_it.only(EVERYTHING)).items():
        np.testing.assert_array_equal(values, table(all_of_it)[name])
    for values, kept in zip(table(all_of_it).values(), before, strict=True):
        np.testing.assert_array_equal(values, kept)


def table(found: Seen) -> dict[str, Array]:
    """All numbers of rows."""
    plain = {name: getattr(found, name) for name in ("norm", "loss", "examples")}
    return {**plain, **columns(found.costs)}


def test_the_columns_are_those_that_can_be_declared() -> None:
    """What is added to Seen is added to `only`, and to the words that policies declare."""
    names = {each.name for each in fields(Seen)} - {"reason", "pace", "costs"} | {"seconds"}
    assert names == COLUMNS == EVERYTHING - {"update"}


MEMBERS = [(kind.name, name) for kind in KINDS.values() for name in kind.members]


@pytest.mark.parametrize(("kind", "name"), MEMBERS)
def test_policies_declare_known_columns(kind: str, name: str) -> None:
    """A policy that declares updates gets each chunk: an estimator by `add`, others by `see`."""
    member = KINDS[kind].members[name]
    assert set(sees(member)) <= EVERYTHING
    watches = all(hasattr(member, method) for method in ("watch", "see", "learn"))
    if hasattr(member, "sees") and kind != "estimator":
        assert watches == ("update" in sees(member))


@given(rows=st.integers(1, MOST), data=st.data())
def test_replies_in_any_order_are_seen_alike(rows: int, data: st.DataObject) -> None:
    """In one chunk or in several; a row that failed has costs, and no norm and no loss."""
    order = np.array(data.draw(st.permutations(range(rows))))
    replied = order[: data.draw(st.integers(0, rows))]
    whole = data.draw(chunks(rows, replied))
    at_once, one_by_one = Seen.nothing(rows), Seen.nothing(rows)
    at_once.add(whole)
    for place in data.draw(st.permutations(range(len(replied)))):
        one_by_one.add(whole.of(np.array([place])))
    for name, values in table(at_once).items():
        np.testing.assert_array_equal(table(one_by_one)[name], values)
    assert at_once.reason == one_by_one.reason
    missing = np.setdiff1d(order, replied)
    assert at_once.waits(np.arange(rows)).nonzero()[0].tolist() == missing.tolist()
    assert all(at_once.reason[row] == NO_REPLY for row in missing)
    for place, row in enumerate(replied.tolist()):
        ok, ran = not whole.reason[place], whole.steps[place] > 0
        assert np.isnan(at_once.norm[row]) == np.isnan(at_once.loss[row]) == (not ok)
        assert np.isnan(at_once.seconds[row]) == np.isnan(at_once.examples[row]) == (not ran)
        assert at_once.costs.down[row] == whole.costs.down[place]
        assert ok == at_once.ok[row]
