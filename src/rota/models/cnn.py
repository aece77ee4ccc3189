"""Convolutional networks.

Filter c of the last convolution owns a block of height * width inputs of the first linear layer.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from rota.models.parts import head, image, net


def cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """CNN (McMahan et al. 2017): two 5x5 convolutions. 1,663,370 parameters on MNIST.

    They have 32 and 64 channels, and there are 512 hidden units. With 62 classes it has 1,690,046
    parameters.
    """
    return _two_convolutions("cnn", shape, classes, channels=(32, 64), hidden=512)


def lenet(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """LeNet-5 with ReLU and max pooling (LeCun et al. 1998). 61,706 parameters on MNIST."""
    colours, height, width = image("lenet", shape, least=16)
    flat = 16 * ((height // 2 - 4) // 2) * ((width // 2 - 4) // 2)
    return net(
        conv1=nn.Conv2d(colours, 6, 5, padding=2),
        act1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        act2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(flat, 120),
        act3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        act4=nn.ReLU(),
        fc3=head(84, classes),
    )


def leaf_femnist(shape: tuple[int, ...] = (1, 28, 28), classes: int = 62) -> nn.Module:
    """LEAF's FEMNIST network: the CNN with 2048 hidden units. 6,603,710 parameters."""
    return _two_convolutions("leaf_femnist", shape, classes, channels=(32, 64), hidden=2048)


def fluid_femnist(shape: tuple[int, ...] = (1, 28, 28), classes: int = 62) -> nn.Module:
    """FLuID's FEMNIST network: 5x5 convolutions with 16 and 64 channels. 410,022 parameters.

    It has 120 hidden units.
    """
    return _two_convolutions("fluid_femnist", shape, classes, channels=(16, 64), hidden=120)


def kvib_cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """K-Vib's FEMNIST network: two 5x5 convolutions without activation. 582,026 parameters.

    They have no padding either, and there are 512 hidden units. K-Vib's paper calls it McMahan's
    CNN; McMahan's is `cnn`.
    """
    return _two_convolutions(
        "kvib_cnn",
        shape,
        classes,
        channels=(32, 64),
        hidden=512,
        padded=False,
        activation=nn.Identity,
    )


def mmfl_cnn(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, width: int = 32) -> nn.Module:
    """MMFL's Fashion-MNIST network: 3x3 convolutions without activation. 1,630,090 parameters.

    MMFL trains it as one of several models. It has 512 linear units. The second convolution has 2 *
    width channels; width = 64 is the wider network of MMFL's code (3,291,402 parameters). That code
    ends in ReLU and softmax, and applies softmax again in the loss. rota leaves both out and
    returns logits.
    """
    return _two_convolutions(
        "mmfl_cnn",
        shape,
        classes,
        channels=(width, 2 * width),
        hidden=512,
        kernel=3,
        activation=nn.Identity,
        hidden_activation=nn.Identity,
    )


def _two_convolutions(
    model: str,
    shape: tuple[int, ...],
    classes: int,
    *,
    channels: tuple[int, int],
    hidden: int,
    kernel: int = 5,
    padded: bool = True,
    activation: type[nn.Module] = nn.ReLU,
    hidden_activation: type[nn.Module] = nn.ReLU,
) -> nn.Module:
    """Convolution, pool, convolution, pool, hidden layer, output.

    `padded` convolutions keep the image's size.
    """
    padding, loss = (kernel // 2, 0) if padded else (0, kernel - 1)
    colours, height, width = image(model, shape, least=4 + 3 * loss)
    flat = channels[1] * _side(height, loss) * _side(width, loss)
    return net(
        conv1=nn.Conv2d(colours, channels[0], kernel, padding=padding),
        act1=activation(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(channels[0], channels[1], kernel, padding=padding),
        act2=activation(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(flat, hidden),
        act3=hidden_activation(),
        fc2=head(hidden, classes),
    )


def _side(size: int, loss: int) -> int:
    """An image's side after two convolutions, which lose `loss` pixels each and are pooled by 2."""
    return ((size - loss) // 2 - loss) // 2


def s2_classic(shape: tuple[int, ...] = (1, 28, 28), classes: int = 10) -> nn.Module:
    """Selective FedAvg's model 2: two 5x5 convolutions, dropout. 21,840 parameters on MNIST.

    They have 10 and 20 channels, and there are 50 hidden units. It is PyTorch's classic MNIST
    example, so the dropout after the second convolution drops whole channels. The paper's "320 and
    50 hidden neurons" are the inputs of its two linear layers.
    """
    colours, height, width = image("s2_classic", shape, least=16)
    return net(
        conv1=nn.Conv2d(colours, 10, 5),
        pool1=nn.MaxPool2d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(10, 20, 5),
        drop1=nn.Dropout2d(0.5),
        pool2=nn.MaxPool2d(2),
        relu2=nn.ReLU(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(20 * _side(height, 4) * _side(width, 4), 50),
        relu3=nn.ReLU(),
        drop2=nn.Dropout(0.5),
        fc2=head(50, classes),
    )


def s2_wide(
    shape: tuple[int, ...] = (1, 28, 28), classes: int = 10, extra: bool = False
) -> nn.Module:
    """Selective FedAvg's model 3: three 3x3 convolutions, BatchNorm. 495,370 parameters on MNIST.

    After them come 6272-64-10 units with BatchNorm and dropout. The paper's "three fully connected
    layers with 6272, 64 and 10 hidden neurons" can also be read as one more hidden layer of 6272
    units: that is extra=True, with 39,852,170 parameters. The paper gives no channel counts; 32 and
    64 before the 128 are rota's choice.
    """
    colours, height, width = image("s2_wide", shape, least=4)
    layers: dict[str, nn.Module] = {}
    for i, (inputs, outputs) in enumerate(((colours, 32), (32, 64), (64, 128)), start=1):
        layers |= {
            f"conv{i}": nn.Conv2d(inputs, outputs, 3, padding=1),
            f"norm{i}": nn.BatchNorm2d(outputs),
            f"relu{i}": nn.ReLU(),
        }
        if i > 1:
            layers[f"pool{i}"] = nn.MaxPool2d(2)
    layers["flatten"] = nn.Flatten()
    flat = 128 * (height // 4) * (width // 4)
    hidden = [flat, flat, 64] if extra else [flat, 64]
    for i, (inputs, outputs) in enumerate(pairwise(hidden), start=4):
        layers |= {
            f"fc{i - 3}": nn.Linear(inputs, outputs),
            f"norm{i}": nn.BatchNorm1d(outputs),
            f"relu{i}": nn.ReLU(),
        }
        layers[f"drop{i - 3}"] = nn.Dropout(0.5)
    return net(**layers, fc=head(64, classes))


def vgg9(shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """FLuID's VGG-9: six 3x3 convolutions of 32 to 128 channels. 1,469,994 parameters.

    Every second convolution is pooled, and there are 512 and 256 hidden units.
    """
    colours, height, width = image("vgg9", shape, least=8)
    layers: dict[str, nn.Module] = {}
    channels = [colours, 32, 32, 64, 64, 128, 128]
    for i in range(1, 7):
        layers |= {
            f"conv{i}": nn.Conv2d(channels[i - 1], channels[i], 3, padding=1),
            f"relu{i}": nn.ReLU(),
        }
        if i % 2 == 0:
            layers[f"pool{i // 2}"] = nn.MaxPool2d(2)
    return net(
        **layers,
        flatten=nn.Flatten(),
        fc1=nn.Linear(128 * (height // 8) * (width // 8), 512),
        relu7=nn.ReLU(),
        fc2=nn.Linear(512, 256),
        relu8=nn.ReLU(),
        fc3=head(256, classes),
    )


def mmfl_emnist(shape: tuple[int, ...] = (1, 28, 28), classes: int = 47) -> nn.Module:
    """MMFL's larger EMNIST network: three 5x5 convolutions, tanh. 456,519 parameters.

    They have 16, 24 and 32 channels, and there are 256 and 84 hidden units.
    """
    colours, height, width = image("mmfl_emnist", shape, least=4)
    return net(
        conv1=nn.Conv2d(colours, 16, 5, padding=2),
        tanh1=nn.Tanh(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(16, 24, 5, padding=2),
        tanh2=nn.Tanh(),
        pool2=nn.MaxPool2d(2),
        conv3=nn.Conv2d(24, 32, 5, padding=2),
        tanh3=nn.Tanh(),
        flatten=nn.Flatten(),
        fc1=nn.Linear(32 * (height // 4) * (width // 4), 256),
        tanh4=nn.Tanh(),
        fc2=nn.Linear(256, 84),
        tanh5=nn.Tanh(),
        fc3=head(84, classes),
    )


def pfl_cnn(shape: tuple[int, ...] = (3, 32, 32), classes: int = 10) -> nn.Module:
    """The CIFAR-10 network of pfl's benchmark: 3x3 convolutions, dropout. 1,626,442 parameters.

    The convolutions have no padding, and there are 128 hidden units. As in pfl, all weights start
    from Glorot's uniform distribution.
    """
    colours, height, width = image("pfl_cnn", shape, least=6)
    module = net(
        conv1=nn.Conv2d(colours, 32, 3),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(32, 64, 3),
        relu2=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        drop1=nn.Dropout(0.25),
        flatten=nn.Flatten(),
        fc1=nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        relu3=nn.ReLU(),
        drop2=nn.Dropout(0.5),
        fc2=head(128, classes),
    )
    for layer in module:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
    return module
