"""Line charts as SVG, by hand: a page on a code host shows an .svg file, and no plotting library draws one without a browser."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)  # Okabe and Ito: told apart by all eyes
DASHES = ("none", "5 4", "1.5 3")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 170, 36, 48


@dataclass(frozen=True)
class Line:
    """A named line. Lines of one `colour` number belong together; a line without a name has no entry in the legend."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 0
    dashed: int = 0
    """A place in DASHES."""
    band: tuple[Sequence[float], Sequence[float]] | None = None
    """The least and the largest y it may as well have: drawn as a shade."""


@dataclass(frozen=True)
class Chart:
    """A line chart; `name` is its file's name."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: list[Line]


def svg(chart: Chart) -> str:
    """The chart as a self-contained SVG document."""
    x_ticks = ticks([value for line in chart.lines for value in line.x])
    y_ticks = ticks(
        [
            value
            for line in chart.lines
            for values in (line.y, *(line.band or ()))
            for value in values
        ]
    )

    def across(value: float) -> float:
        return LEFT + (value - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - LEFT - RIGHT)

    def down(value: float) -> float:
        return (
            HEIGHT
            - BOTTOM
            - (value - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - TOP - BOTTOM)
        )

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">'
    ]
    out.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')  # pages may be dark
    for tick in x_ticks:
        out.append(_stroke(f"M{across(tick):.1f} {TOP}V{HEIGHT - BOTTOM}", "#ddd"))
        out.append(_text(f"{tick:g}", across(tick), HEIGHT - BOTTOM + 18, "middle"))
    for tick in y_ticks:
        out.append(_stroke(f"M{LEFT} {down(tick):.1f}H{WIDTH - RIGHT}", "#ddd"))
        out.append(_text(f"{tick:g}", LEFT - 8, down(tick) + 4, "end"))
    out.append(_text(chart.title, LEFT, 22, "start"))
    out.append(_text(chart.x_label, (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    out.append(_text(chart.y_label, 16, middle, "middle", f' transform="rotate(-90 16 {middle})"'))
    entry = TOP + 6
    for line in chart.lines:
        path = "M" + "L".join(
            f"{across(x):.1f} {down(y):.1f}" for x, y in zip(line.x, line.y, strict=True)
        )
        colour = COLOURS[line.colour % len(COLOURS)]
        if line.band:
            corners = [
                *zip(line.x, line.band[0], strict=True),
                *reversed([*zip(line.x, line.band[1], strict=True)]),
            ]
            shade = "M" + "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in corners)
            out.append(f'<path d="{shade}Z" fill="{colour}" fill-opacity="0.12"/>')
        out.append(_stroke(path, colour, line.dashed, 1.8))
        if line.name:
            out.append(_stroke(f"M{WIDTH - RIGHT + 12} {entry}h24", colour, line.dashed, 1.8))
            out.append(_text(line.name, WIDTH - RIGHT + 42, entry + 4, "start"))
            entry += 18
    return "\n".join([*out, "</svg>", ""])


def ticks(values: list[float]) -> list[float]:
    """About six round numbers (1, 2 or 5 times a power of ten apart) that span the values."""
    low, high = min(values), max(values)
    largest = max(abs(low), abs(high))
    if (
        high - low <= 1e-9 * largest or largest < 1e-300
    ):  # a flat line still needs a span, and so does one too small for logarithms
        span = largest if largest >= 1e-300 else 1.0
        low, high = low - span / 2, high + span / 2
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    first -= first * step > low + 1e-9 * abs(
        low
    )  # where low / step is too small for a number, and so 0
    last += last * step < high - 1e-9 * abs(high)
    return [i * step for i in range(first, last + 1)]


def _stroke(path: str, colour: str, dashed: int = 0, width: float = 1) -> str:
    dashes = f' stroke-dasharray="{DASHES[dashed]}"' if dashed else ""
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'


def _text(text: str, x: float, y: float, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#222"{more}>{escape(text)}</text>'
