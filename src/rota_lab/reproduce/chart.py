"""Line charts as SVG, written by hand.

A page on a code host shows an .svg file, and no plotting library writes one without a browser.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart."""
DASHES = ("none", "5 4", "1.5 3")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 170, 36, 48
ACROSS, DOWN = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM


@dataclass(frozen=True)
class Line:
    """A line of a chart. Lines that belong together have the same `colour`, a number.

    A line without a name has no entry in the legend.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: int = 0
    """A place in DASHES."""
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """The lower and the upper end of an interval around each y, drawn as a shade."""


@dataclass(frozen=True)
class Chart:
    """A line chart; its file is called `name`."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]


def svg(chart: Chart) -> str:
    """The chart as a self-contained SVG document."""
    xs: list[float] = []
    ys: list[float] = []
    for line in chart.lines:
        xs += line.x
        ys += line.y
        for edge in line.band or ():
            ys += edge
    x_ticks, y_ticks = ticks(xs), ticks(ys)

    def point(x: float, y: float) -> tuple[float, float]:
        """Where a point lies in the picture."""
        across = LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * ACROSS
        down = HEIGHT - BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * DOWN
        return across, down

    def path(x: Sequence[float], y: Sequence[float]) -> str:
        """A line through points."""
        points = [point(*each) for each in zip(x, y, strict=True)]
        return "M" + "L".join(f"{across:.1f} {down:.1f}" for across, down in points)

    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>']
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')  # pages may be dark
    for tick in x_ticks:
        across, _ = point(tick, y_ticks[0])
        out.append(_stroke(f"M{across:.1f} {TOP}V{HEIGHT - BOTTOM}", "#ddd"))
        out.append(_text(f"{tick:g}", across, HEIGHT - BOTTOM + 18, "middle"))
    for tick in y_ticks:
        _, down = point(x_ticks[0], tick)
        out.append(_stroke(f"M{LEFT} {down:.1f}H{WIDTH - RIGHT}", "#ddd"))
        out.append(_text(f"{tick:g}", LEFT - 8, down + 4, "end"))
    out.append(_text(chart.title, LEFT, 22, "start"))
    out.append(_text(chart.x_label, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(_text(chart.y_label, 16, middle, "middle", f' transform="rotate(-90 16 {middle})"'))
    entry = TOP + 6
    for line in chart.lines:
        colour = COLOURS[line.colour % len(COLOURS)]
        if line.band:
            low, high = line.band
            shade = path([*line.x, *reversed(line.x)], [*low, *reversed(high)])
            out.append(f'<path d="{shade}Z" fill="{colour}" fill-opacity="0.12"/>')
        out.append(_stroke(path(line.x, line.y), colour, line.dashed, 1.8))
        if line.name:
            out.append(_stroke(f"M{WIDTH - RIGHT + 12} {entry}h24", colour, line.dashed, 1.8))
            out.append(_text(line.name, WIDTH - RIGHT + 42, entry + 4, "start"))
            entry += 18
    return "\n".join([*out, "</svg>", ""])


def ticks(values: list[float]) -> list[float]:
    """About six round numbers (1, 2 or 5 times a power of ten apart) that span the values."""
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    # a flat line needs a span, too, and so do values that are too small for logarithms
    if high - low <= 1e-9 * largest or largest < 1e-300:
        span = largest if largest >= 1e-300 else 1.0
        low, high = low - span / 2, high + span / 2
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    # low / step may be so small that it rounds to 0
    first -= first * step > low + 1e-9 * abs(low)
    last += last * step < high - 1e-9 * abs(high)
    return [i * step for i in range(first, last + 1)]


def _stroke(path: str, colour: str, dashed: int = 0, width: float = 1) -> str:
    dashes = f' stroke-dasharray="{DASHES[dashed]}"' if dashed else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _text(text: str, x: float, y: float, anchor: str, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="#222"{more}>{escape(text)}</text>'
