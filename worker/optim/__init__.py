"""Optimizers whose states, weights and gradients are held in few bits: a walker over stored tensors, and rules for it."""

from worker.optim.adam import Hyperparameters, LowBitAdamW
from worker.optim.adopt import OPTIMIZERS, REPRESENTABLE, adopt
from worker.optim.build import build_optimizer, make_by_name
from worker.optim.check import check_adoptable
from worker.optim.clip import clip_grad_norm_
from worker.optim.lion import LionHyperparameters, LowBitLion
from worker.optim.offload import offload_optimizer
from worker.optim.optimizer import LowBitOptimizer
from worker.optim.release import release_gradients
from worker.optim.sgd import LowBitSGD, SGDHyperparameters
from worker.optim.take_over import take_over
from worker.optim.weights import QuantizedWeight

__all__ = [
    "OPTIMIZERS",
    "REPRESENTABLE",
    "Hyperparameters",
    "LionHyperparameters",
    "LowBitAdamW",
    "LowBitLion",
    "LowBitOptimizer",
    "LowBitSGD",
    "QuantizedWeight",
    "SGDHyperparameters",
    "adopt",
    "build_optimizer",
    "check_adoptable",
    "clip_grad_norm_",
    "make_by_name",
    "offload_optimizer",
    "release_gradients",
    "take_over",
]
