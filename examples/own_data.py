# Your own data: a pair of arrays or tensors per client, and a test pair that all share (or one per
# client).
import numpy as np
from sklearn.datasets import load_breast_cancer

import rota

x, y = load_breast_cancer(return_X_y=True)
x = (x - x.mean(0)) / x.std(0)
test, *clinics = np.array_split(np.random.default_rng(0).permutation(len(y)), 6)
train = [(x[rows], y[rows]) for rows in clinics]
fed = rota.from_clients(train, test=(x[test], y[test]), name="clinics")

run = rota.run([rota.Task(rota.models.logistic, fed)], rota.sampling.Full(), rounds=20)
print(run.summary["accuracy"])
