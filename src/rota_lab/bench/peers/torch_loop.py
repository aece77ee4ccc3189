"""FedAvg in plain torch, as a user writes it: a loop over clients, and their weighted mean."""

from __future__ import annotations

import sys

import torch
import work as shared  # type: ignore[import-not-found]


def main(folder: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    work = shared.load(folder)
    x, y = torch.from_numpy(work.x).to(work.device), torch.from_numpy(work.y).to(work.device)
    server, client = shared.network(work).to(work.device), shared.network(work).to(work.device)
    ends = []
    for cohort in work.cohorts:
        sizes = [len(y[work.rows(c)]) for c in cohort]
        mean = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
        for c, size in zip(cohort, sizes, strict=True):
            client.load_state_dict(server.state_dict())
            shared.train(client, x[work.rows(c)], y[work.rows(c)], work)
            for name, value in client.state_dict().items():
                mean[name] += value * (size / sum(sizes))
        server.load_state_dict(mean)
        ends.append(shared.now(work.device))
    shared.report(work, ends, shared.score(server, work), torch.__version__)


if __name__ == "__main__":
    main(*sys.argv[1:])
