"""rota demo: demonstrations on this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rota.cli import loading
from rota.cli.options import Json, one_of
from rota.cli.output import print_json, print_line


def demo(
    what: Annotated[str, typer.Argument(help="What is shown.", **one_of(["flower"]))] = "flower",
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds of each of the two runs.")] = 12,
    nodes: Annotated[int, typer.Option(metavar="N", help="How many nodes.")] = 5,
    as_json: Json = False,
) -> None:
    """Show FLuID on real processes, one of them really slow.

    \b
    Examples:
      rota demo flower
      rota demo flower --rounds 6
    """
    with loading():
        from rota.cli import progress
        from rota.flower import demo as shown

    def show(sides: list[Any]) -> None:
        fluid, plain = sides
        slowest = fluid.nodes[-1][-1], plain.nodes[-1][-1]
        progress.say(
            f"round {len(fluid.rounds)}/{rounds}: with FLuID {fluid.rounds[-1]:.1f} s (slow node "
            f"{slowest[0]:.1f} s, next width {fluid.width:.2f}), without {plain.rounds[-1]:.1f} s "
            f"(slow node {slowest[1]:.1f} s)"
        )

    found = shown.demo(rounds, nodes, progress.say, show)
    totals = {side.name: sum(side.rounds) for side in found.sides}
    if as_json:
        print_json(
            {
                "seconds": totals,
                "faster": found.faster,
                "slow_node_over_target": found.off,
                "slow_node_over_others": found.behind,
                "accuracy": {side.name: side.accuracy for side in found.sides},
                "width": found.sides[0].width,
            }
        )
        return
    fluid = found.sides[0]
    for side in found.sides:
        print_line(f"{side.name}: {totals[side.name]:.1f} s, accuracy {side.accuracy:.2%}")
    words = "faster" if found.faster > 0 else "slower"
    print_line(f"with FLuID the run is {abs(found.faster):.0%} {words}")
    print_line(
        f"the slow node's time is {found.off:+.0%} from the target of {fluid.targets[-1]:.2f} s, "
        f"and {found.behind:+.0%} from the slowest other node's"
    )
