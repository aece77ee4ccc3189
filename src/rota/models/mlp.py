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


def linear(shape: tuple[int, ...] = (60,), classes: int = 10, outputs: int = 1) -> nn.Module:
    """Linear regression: one linear layer with as many outputs as targets, or as classes."""
    return net(flatten=nn.Flatten(), fc=nn.Linear(prod(shape), classes or outputs))


def mlp(
    shape: tuple[int, ...] = (60,),
    classes: int = 10,
    hidden: tuple[int, ...] = (64,),
    outputs: int = 1,
) -> nn.Module:
    """Hidden layers of ReLU units of your sizes, with an output for each class or target."""
    layers: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    width = prod(shape)
    for number, units in enumerate(hidden, start=1):
        layers |= {f"fc{number}": nn.Linear(width, units), f"relu{number}": nn.ReLU()}
        width = units
    return net(**layers, out=nn.Linear(width, classes or outputs))


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
