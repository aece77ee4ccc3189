"""`python -m rota_lab.bench`: `rota bench` for machines that have only torch and numpy."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rota.errors import BadInput
from rota_lab import bench


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rota_lab.bench", description=bench.__doc__)
    parser.add_argument("work", choices=list(bench.names()))
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--peers", default="all", help=f"all, none, or some of {','.join(bench.PEERS)}"
    )
    parser.add_argument("--rounds", type=int, help="measured rounds per pass")
    parser.add_argument(
        "--quick", action="store_true", help="one pass, without rota's reference engine"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="a file for the results, the machine and the versions, written after every run",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    try:
        peers = bench.chosen(given.peers)
        result = bench.bench(
            given.work,
            device=given.device,
            peers=peers,
            rounds=given.rounds,
            quick=given.quick,
            out=given.out,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except BadInput as mistake:
        parser.error(str(mistake))
    print(json.dumps(result.rows) if given.json else "\n".join(bench.table(result)))


if __name__ == "__main__":
    main()
