"""How a run may be computed: the engines, devices and precisions by name.

It imports nothing, so that the command line can show and complete the names without loading torch.
"""

ENGINES = {
    "sequential": "rota.engine.sequential:Sequential",
    "batched": "rota.engine.batched:Batched",
    "flower": "rota.flower:Flower",
}
"""Name -> module:class. The class has `make(experiment, options)`, which returns an Engine."""
DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp32", "tf32", "bf16")
