"""A user's own network, built by a function that this rank's process imports (`api_schemas/models/python.py`)."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from octet.api_schemas import ANY_FILE, Files
from octet.api_schemas.models.python import PythonSpec
from octet.worker.common.errors import InvalidConfig
from octet.worker.models.model import Losses, TrainedModel

WHAT_IT_RETURNS = "a torch.nn.Module on the CPU with a method loss(batch), which returns the mean loss, a tensor of shape ()"


class UserModel(TrainedModel):
    """Calls a user's network. Its only metric is the loss."""

    def __init__(self, network: nn.Module, entrypoint: str) -> None:
        super().__init__()
        self.network, self.entrypoint = network, entrypoint

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the network's mean loss in fp32, (). Raises InvalidConfig if it returns anything else."""
        loss: Any = self.network.loss(batch)  # type: ignore[operator]
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            got = f"{loss.dtype} of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InvalidConfig(
                f"model.entrypoint {self.entrypoint}: loss(batch) returned a {got}; allowed: a floating-point tensor of "
                "shape (). Return the mean over the batch's targets."
            )
        return loss.float()

    def loss(self, batch: Mapping[str, Tensor]) -> Losses:
        """Return the network's loss, with the number of targets in the batch."""
        counted = batch["num_targets"].sum() if "num_targets" in batch else batch["targets" if "targets" in batch else "labels"]
        num_targets = int(counted) if "num_targets" in batch and not self.training else counted.numel()
        return Losses(self(batch), num_targets, {})


def build(spec: PythonSpec, seed: int, _files: Files = ANY_FILE) -> UserModel:
    """Import the entry point, call it with the arguments, and check what it returns. Raises InvalidConfig.

    torch's random numbers follow the seed, so the same function gives the same initial values on every rank.
    """
    make = _imported(spec.entrypoint)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            network = make(**spec.arguments)
        except Exception as error:
            message = (
                f"model.entrypoint {spec.entrypoint} raised {type(error).__name__}: {error}. Correct it or model.arguments."
            )
            raise InvalidConfig(message) from error
    if not isinstance(network, nn.Module) or not callable(getattr(network, "loss", None)):
        has_loss = "without loss" if isinstance(network, nn.Module) else "which is no torch.nn.Module"
        raise InvalidConfig(
            f"model.entrypoint {spec.entrypoint} returned a {type(network).__name__} {has_loss}; allowed: {WHAT_IT_RETURNS}. "
            "Change the function."
        )
    return UserModel(network.train(), spec.entrypoint)


def _imported(entrypoint: str) -> Callable[..., Any]:
    module_name, _, name = entrypoint.partition(":")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except Exception as error:
        raise InvalidConfig(
            f"model.entrypoint {entrypoint} cannot be imported on this node: {type(error).__name__}: {error}; allowed: a "
            "function that the workers' Python finds. Install the package in their image, or correct the name."
        ) from error
    if not callable(found):
        raise InvalidConfig(
            f"model.entrypoint {entrypoint} is a {type(found).__name__}; allowed: a function. Correct the name."
        )
    make: Callable[..., Any] = found
    return make
