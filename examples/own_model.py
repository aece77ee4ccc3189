# Your own network: any nn.Module class or function. Parameters named `shape` and `classes` are
# filled from the data.
from torch import nn

import rota


class Small(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 16, 3)
        self.norm = nn.GroupNorm(4, 16)
        self.out = nn.Linear(16 * 6 * 6, classes)

    def forward(self, x):
        return self.out(self.norm(self.conv(x)).relu().flatten(1))


print(rota.run([rota.Task(Small, rota.data.digits(), lr=0.05)], rounds=30).summary["accuracy"])
