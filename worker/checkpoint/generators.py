"""The state of torch's random generators, as a checkpoint holds it."""

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """Return the state of torch's random generators on this rank."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
