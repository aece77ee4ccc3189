"""FedAvg in pfl: its SimulatedBackend, users that are ready in memory, weights by data points."""

# mypy: ignore-errors
from __future__ import annotations

import os
import sys
from importlib import metadata

import torch
import torch.nn.functional as F
import work as shared

work = shared.load(sys.argv[1])
os.environ["PFL_PYTORCH_DEVICE"] = work.device  # read when pfl is imported

from pfl.aggregate.simulate import SimulatedBackend  # noqa: E402
from pfl.aggregate.weighting import WeightByDatapoints  # noqa: E402
from pfl.algorithm.base import NNAlgorithmParams  # noqa: E402
from pfl.algorithm.federated_averaging import FederatedAveraging  # noqa: E402
from pfl.callback.base import TrainingProcessCallback  # noqa: E402
from pfl.data.dataset import Dataset  # noqa: E402
from pfl.data.federated_dataset import FederatedDataset  # noqa: E402
from pfl.hyperparam import NNTrainHyperParams  # noqa: E402
from pfl.metrics import Metrics  # noqa: E402
from pfl.model.pytorch import PyTorchModel  # noqa: E402


class Module(torch.nn.Module):
    """A network with the two methods that pfl requires."""

    def __init__(self) -> None:
        super().__init__()
        self.net = shared.network(work)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.net(x), y)

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict:
        return {}


class Clock(TrainingProcessCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics, model, *, central_iteration
    ) -> tuple[bool, Metrics]:
        self.ends.append(shared.now(work.device))
        return False, Metrics()


def main(threads: str) -> None:
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    x, y = torch.from_numpy(work.x).to(work.device), torch.from_numpy(work.y).to(work.device)
    users = [
        Dataset([x[work.rows(c)], y[work.rows(c)]], user_id=str(c)) for c in range(work.clients)
    ]
    drawn = iter(work.cohorts.ravel().tolist())
    data = FederatedDataset(users.__getitem__, lambda: next(drawn))
    module = Module()
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    rounds, cohort = work.cohorts.shape
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=10**9,
            train_cohort_size=cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(data, data, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_num_epochs=work.epochs, local_learning_rate=work.lr, local_batch_size=work.batch
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,  # it would print them every round
    )
    if int(os.environ.get("RANK", 0)) == 0:
        shared.report(work, clock.ends, shared.score(module.net, work), metadata.version("pfl"))


if __name__ == "__main__":
    main(sys.argv[2])
