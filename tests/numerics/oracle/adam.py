"""Adam and AdamW in fp64, from the papers: Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Adam64:
    """One parameter. decoupled: weight decay as AdamW has it; else it is added to the gradient."""

    weight: np.ndarray
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    num_steps: int = 0
    exp_avg: np.ndarray | float = 0.0
    exp_avg_sq: np.ndarray | float = 0.0

    def step(self, gradient: np.ndarray) -> None:
        """One step; eps is added outside the root, after bias correction."""
        self.num_steps += 1
        beta1, beta2 = self.betas
        if self.decoupled:
            self.weight = self.weight * (1 - self.lr * self.weight_decay)
        else:
            gradient = gradient + self.weight_decay * self.weight
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * gradient
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * gradient**2
        first = self.exp_avg / (1 - beta1**self.num_steps)
        second = self.exp_avg_sq / (1 - beta2**self.num_steps)
        self.weight = self.weight - self.lr * first / (np.sqrt(second) + self.eps)
