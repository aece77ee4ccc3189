"""`python -m rota_lab.reproduce`: `rota reproduce` for machines that have only torch and numpy."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rota.errors import BadInput
from rota.running.record import finite
from rota_lab import reproduce


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rota_lab.reproduce", description=reproduce.__doc__
    )
    parser.add_argument("name", choices=list(reproduce.REPRODUCTIONS))
    parser.add_argument(
        "--quick", action="store_true", help="run a small version, to see that it works"
    )
    parser.add_argument("--only", help="run these parts, such as 2nn-iid,cnn-B10-C0.1")
    parser.add_argument(
        "--minutes", type=float, help="stop after this time; 0 only writes the page"
    )
    parser.add_argument(
        "--estimate", action="store_true", help="print how much work it is, and do none"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"))
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/reproduce"),
        help="the folder of the page and the finished parts",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    try:
        if given.estimate:
            print("\n".join(reproduce.estimate(given.name, given.only, given.out, given.quick)))
            return
        options = {key: getattr(given, key) for key in ("only", "minutes", "device", "precision")}
        result = reproduce.run(
            given.name,
            given.quick,
            given.out,
            lambda text: print(text, file=sys.stderr, flush=True),
            **options,
        )
    except BadInput as mistake:
        parser.error(str(mistake))
    page = reproduce.write_page(result, given.out)
    if given.json:
        print(json.dumps(finite(result.rows), allow_nan=False))
        return
    print("\n".join([*reproduce.table(result), f"page: {page}"]))


if __name__ == "__main__":
    main()
