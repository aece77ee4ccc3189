"""The page of the reproduction `complexity`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rota_lab.reproduce.chart import Chart, Line
from rota_lab.reproduce.interval import Statement, judged
from rota_lab.reproduce.parts import Found
from rota_lab.reproduce.result import Result, Row, over_seeds
from rota_lab.reproduce.selective_page import line

POINTS = " points"
FAMILIES = ("mlp", "cnn")
TEXT = """
The trade-off that Selective FedAvg's conclusion asks for: how far does a more complex model help
where data are non-IID, and what does it cost? Nine nodes hold data in three partitions at 0 %
balanced (labels 0-3, 4-6 or 7-9). The *global* test has all test images; the *own* tests have the
mix of labels of the node's training images. Two families of networks grow in width and in depth:
`mlp` has hidden layers of equal width, and `cnn` 3x3 convolutions with equal numbers of channels,
each pooled by 2, before one linear layer.
"""
PROFILE = (
    "A round's bytes and seconds are those of one node that trains: it fetches the model, makes "
    "one pass over its images, and sends its update. The seconds are of the virtual clock, on a "
    "device like a Raspberry Pi 4: 5 GFLOP/s sustained, 50 Mbit/s, and 10 ms for a round trip. "
    "These are assumptions; with `selective` the extra round is spread over all rounds."
)


def report(pieces: Sequence[Any], found: dict[str, Found], quick: bool, device: str) -> Result:
    """The page about all finished runs."""
    done = {(p.family, p.depth, p.width, p.method): p for p in pieces if p.name in found}
    work = pieces[0].work

    def values(key: tuple[str, int, int, str], what: str) -> list[float]:
        if key not in done:
            return []
        return [run[what] for run in found[done[key].name]["runs"].values()]

    def apart(one: Any, two: Any, what: str) -> list[float]:
        each = zip(values(one, what), values(two, what), strict=False)
        return [a - b for a, b in each]

    lines = [TEXT.strip(), "", PROFILE, "", f"All networks train with lr {work.lr:g} in mini-"]
    lines[-1] += f"batches of {work.batch}, for {work.rounds} rounds of {work.epochs} local epoch."
    lines += ["", f"{len(done)} of {len(pieces)} runs are finished; the others are left out."]
    if quick:
        lines[-1] += " The short version is on scikit-learn's 8x8 digits."
    machines = sorted({found[p.name]["machine"] for p in done.values()})
    precisions = sorted({found[p.name]["precision"] for p in done.values()})
    lines += ["", f"They were played in {' and '.join(precisions)} on {'; '.join(machines)}.", ""]
    networks = list(dict.fromkeys(key[:3] for key in done))
    networks.sort(key=lambda each: (FAMILIES.index(each[0]), *each[1:]))
    lines += _table(networks, done, found, values)
    return Result(
        name="complexity",
        title="Model complexity against non-IID data",
        text="\n".join(lines),
        rows=_rows(networks, values),
        charts=_charts(networks, done, found, values),
        quick=quick,
        device=device,
        claims=judged([each for each in _claims(networks, apart) if each.values]),
    )


def _per_round(part: Found, what: str, nodes: int = 9) -> float:
    """Bytes of one node, or seconds, in a round."""
    total = part[what] / (nodes if what == "bytes" else 1)
    return float(total / part["rounds"][-1])


def _table(
    networks: Sequence[Any],
    done: dict[Any, Any],
    found: dict[str, Found],
    values: Callable[..., Any],
) -> list[str]:
    head = "| family | depth | width | parameters | KB per round | s per round | FedAvg, global |"
    lines = [
        head + " FedAvg, own | Selective, own | KB with groups | s with groups |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for network in networks:
        cells = [str(each) for each in network]
        parts = {
            m: found[done[*network, m].name]
            for m in ("fedavg", "selective")
            if (*network, m) in done
        }
        cells.append(f"{next(iter(parts.values()))['parameters']:,}")

        def cost(method: str, parts: dict[str, Found] = parts) -> list[str]:
            if method not in parts:
                return ["–", "–"]
            kilobytes = _per_round(parts[method], "bytes") / 1e3
            return [f"{kilobytes:,.0f}", f"{_per_round(parts[method], 'virtual_seconds'):.2f}"]

        cells += cost("fedavg")
        for method, what in (("fedavg", "shared"), ("fedavg", "mean"), ("selective", "mean")):
            some = values((*network, method), what)
            cells.append(f"{100 * np.mean(some):.2f} %" if some else "–")
        lines.append(f"| {' | '.join(cells + cost('selective'))} |")
    return [*lines, ""]


def _rows(networks: Sequence[Any], values: Callable[..., Any]) -> list[Row]:
    rows = []
    for family, depth, width in networks:
        for method, what, words in (
            ("fedavg", "shared", "global test set"),
            ("fedavg", "mean", "own test sets, mean node"),
            ("selective", "mean", "own test sets, mean node"),
            ("selective", "worst", "own test sets, worst node"),
        ):
            some = values((family, depth, width, method), what)
            if some:
                name = f"{family}, depth {depth}, width {width}, {method}: {words}"
                rows.append(over_seeds(name, None, some))
    return rows


def _charts(
    networks: Sequence[Any],
    done: dict[Any, Any],
    found: dict[str, Found],
    values: Callable[..., Any],
) -> list[Chart]:
    shapes = list(dict.fromkeys((family, depth) for family, depth, _ in networks))

    def curve(
        shape: tuple[str, int], method: str, what: str, axis: str, colour: int, dashed: int
    ) -> Line:
        points = []
        for network in networks:
            key = (*network, method)
            if network[:2] != shape or (*network, "fedavg") not in done:
                continue
            part = found[done[*network, "fedavg"].name]
            x = part["parameters"] if axis == "parameters" else _per_round(part, axis)
            points.append((float(np.log10(x)), values(key, what)))
        name = f"{shape[0]}, depth {shape[1]}" + ", groups" * (method == "selective")
        return line(name, points, colour, dashed)

    def chart(name: str, title: str, x: str, lines: list[Line]) -> Chart:
        return Chart(name, title, x, "accuracy", [each for each in lines if len(each.x) > 1])

    time = "log10 of a round's seconds on the device like a Raspberry Pi 4"
    size = "log10 of the number of parameters"
    plain = [
        [curve(s, "fedavg", "shared", axis, k, 0) for k, s in enumerate(shapes)]
        for axis in ("virtual_seconds", "parameters")
    ]
    both = [
        curve(s, method, "mean", "virtual_seconds", k, dashed)
        for k, s in enumerate(shapes)
        for dashed, method in enumerate(("fedavg", "selective"))
    ]
    out = [
        chart("time", "FedAvg at 0 % on the global test: what a round's time buys", time, plain[0]),
        chart("size", "FedAvg at 0 % on the global test: what parameters buy", size, plain[1]),
        chart("groups", "Own tests at 0 %: FedAvg, and with Selective's groups", time, both),
    ]
    return [each for each in out if each.lines]


def _claims(networks: Sequence[Any], apart: Callable[..., Any]) -> list[Statement]:
    out = []
    for family in FAMILIES:
        mine = [each for each in networks if each[0] == family]
        widths, depths = ({each[k] for each in mine} for k in (2, 1))
        if not mine:
            continue
        small, large = min(widths), max(widths)
        shallow, deep = min(depths), max(depths)
        for words, one, two in (
            (f"width {large} beats {small} at depth {shallow}", (shallow, large), (shallow, small)),
            (f"depth {deep} beats {shallow} at width {large}", (deep, large), (shallow, large)),
        ):
            if one == two:
                continue
            values = apart((family, *one, "fedavg"), (family, *two, "fedavg"), "shared")
            sentence = f"{family}, FedAvg on the global test: {words}"
            out.append(Statement(sentence, values, POINTS, 0.01))
    for network in networks:
        values = apart((*network, "selective"), (*network, "fedavg"), "mean")
        family, depth, width = network
        words = f"{family}, depth {depth}, width {width}: groups beat FedAvg on the own tests"
        out.append(Statement(words, values, POINTS, 0.01))
    return out
