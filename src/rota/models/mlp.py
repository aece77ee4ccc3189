"""Networks of fully connected layers, which take examples of any shape."""

from __future__ import annotations

from math import prod

from torch import nn

from rota.models.parts import head, net


def logistic(shape: tuple[int, ...] = (60,), classes: int = 10) -> nn.Module:
    """Logistic regression: one linear layer on the flattened example (K-Vib on Synthetic(α, β)).

    K-Vib's code applies softmax here and once more in its loss. rota returns logits, so the same
    learning rate makes larger steps here than there.
    """
    return net(flatten=nn.Flatten(), fc=head(prod(shape), classes))


def two_nn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """2NN: two hidden layers of 200 ReLU units. 199,210 parameters on MNIST.

    McMahan et al. 2017.
    """
    return net(
        flatten=nn.Flatten(),
        fc1=nn.Linear(prod(shape), 200),
        relu1=nn.ReLU(),
        fc2=nn.Linear(200, 200),
        relu2=nn.ReLU(),
        fc3=head(200, classes),
    )


def s2_small(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """Selective FedAvg's model 1: one hidden layer of 30 ReLU units. 23,860 parameters on MNIST."""
    return net(
        flatten=nn.Flatten(), fc1=nn.Linear(prod(shape), 30), relu1=nn.ReLU(), fc2=head(30, classes)
    )
