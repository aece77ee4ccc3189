"""What the models share: named layers in a row, an output layer, a check of the data's shape."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from rota.errors import BadInput


def net(**layers: nn.Module) -> nn.Sequential:
    """Layers in a row, under their own names: conv1.weight rather than 0.weight."""
    return nn.Sequential(OrderedDict(layers))


def head(inputs: int, classes: int) -> nn.Linear:
    """The output layer: one logit per class."""
    if classes < 1:
        raise BadInput(
            f"the built-in models need class labels, and the data have classes = {classes}; give a "
            "module of your own instead"
        )
    return nn.Linear(inputs, classes)


def image(model: str, shape: tuple[int, ...], least: int = 1) -> tuple[int, int, int]:
    """(channels, height, width) of one example, which must be an image that is large enough."""
    if len(shape) != 3:
        raise BadInput(
            f"{model} takes images of shape (channels, height, width), not examples of shape "
            f"{shape}; use two_nn or logistic"
        )
    channels, height, width = shape
    if min(height, width) < least:
        raise BadInput(
            f"{model} takes images from {least} x {least} on, not {height} x {width}; use a "
            "smaller model, such as two_nn"
        )
    return channels, height, width
