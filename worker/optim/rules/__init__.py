"""The arithmetic of each optimizer: a `Rule` on fp32 tensors, its hyperparameters, and the optimizer class that steps by it.

A rule is added by a module here, a branch in `worker/kernels/cuda/optimizer_rules.py`, a line in `worker/optim/registry.py` and
its name in `api_schemas/optimization.py`.
"""
