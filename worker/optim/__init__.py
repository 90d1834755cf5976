"""Optimizers whose states, weights and gradients are held in few bits: a walker over stored tensors, and rules for it."""

from octet.worker.optim.adopt import REPRESENTABLE, adopt, check_adoptable
from octet.worker.optim.clip import clip_grad_norm_
from octet.worker.optim.offload import offload_optimizer
from octet.worker.optim.optimizer import LowBitOptimizer
from octet.worker.optim.registry import OPTIMIZERS, build_optimizer, make_by_name
from octet.worker.optim.release import release_gradients
from octet.worker.optim.rules.adam import Hyperparameters, LowBitAdamW
from octet.worker.optim.rules.lion import LionHyperparameters, LowBitLion
from octet.worker.optim.rules.muon import LowBitMuon, MuonHyperparameters, hidden_matrices, muon_groups
from octet.worker.optim.rules.sgd import LowBitSGD, SGDHyperparameters
from octet.worker.optim.states import HeldParameter
from octet.worker.optim.take_over import take_over
from octet.worker.optim.weights import QuantizedWeight

__all__ = [
    "OPTIMIZERS",
    "REPRESENTABLE",
    "HeldParameter",
    "Hyperparameters",
    "LionHyperparameters",
    "LowBitAdamW",
    "LowBitLion",
    "LowBitMuon",
    "LowBitOptimizer",
    "LowBitSGD",
    "MuonHyperparameters",
    "QuantizedWeight",
    "SGDHyperparameters",
    "adopt",
    "build_optimizer",
    "check_adoptable",
    "clip_grad_norm_",
    "hidden_matrices",
    "make_by_name",
    "muon_groups",
    "offload_optimizer",
    "release_gradients",
    "take_over",
]
