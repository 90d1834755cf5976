"""The moving average of a job's weights (`training.ema_decay`): kept through the run, evaluated, saved and exported.

average = decay · average + (1 - decay) · weight after each step; the first step's weights begin it (Polyak and Juditsky 1992;
Touvron et al. 2021, table 9). A weight stored as codes is averaged in fp32.
"""

from typing import Any

from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from octet.worker.fp8.stored import exact_state_dict
from octet.worker.metrics.memory import memory_report
from octet.worker.prepare.average import AveragedModel


class MovingAverage:
    """The average of a converted model's weights, or nothing if `decay` is None. Every rank holds it whole."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self._average = None
        if decay is not None:
            self._average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
            self._average.requires_grad_(False)

    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        if self._average is not None:
            self._average.update_parameters(model)

    def best(self, model: nn.Module) -> nn.Module:
        """Return the network to evaluate and export: the average once it has begun, else the model."""
        return model if self._average is None or not self._average.n_averaged else self._average.module

    @property
    def num_bytes(self) -> int:
        """Bytes of the averaged weights."""
        return 0 if self._average is None else memory_report(self._average.module, None)["weights"]

    def state_dict(self) -> dict[str, Any]:
        """Return the average and the number of steps in it; nothing if there is none."""
        return {} if self._average is None else exact_state_dict(self._average)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a saved average. From a checkpoint without one, the average begins with the next step."""
        if self._average is not None and state:
            self._average.load_state_dict(state)
