"""AdamW and Adam with low-precision states, weights and gradients."""

from worker.optim.adamw import Hyperparameters, LowBitAdamW
from worker.optim.adopt import adopt
from worker.optim.weights import QuantizedWeight

__all__ = ["Hyperparameters", "LowBitAdamW", "QuantizedWeight", "adopt"]
