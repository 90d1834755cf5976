"""The states of torch's random generators on all ranks, in a checkpoint."""

import torch
from torch import Tensor

from octet.worker.mesh import Axis


def random_state(world: Axis) -> dict[str, Tensor]:
    """Return the states of torch's random generators: uint8, (bytes), of R ranks (R, bytes).

    All ranks call it together.

    The states of several ranks are on their device: the host does not wait for the gather.
    """
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if world.size == 1:
        return state
    if world.device.type == "cuda":
        state = {name: part.pin_memory().to(world.device, non_blocking=True) for name, part in state.items()}
    return {name: world.start_gather(part).wait() for name, part in state.items()}


def set_random_state(state: dict[str, Tensor], world: Axis) -> None:
    """Go on with this rank's random numbers.

    With another number of ranks than saved them, each has numbers of its own.
    """
    states = {name: part.cpu().view(-1, part.shape[-1]) for name, part in state.items()}
    number, num_saved = world.rank, len(states["cpu"])
    torch.set_rng_state(states["cpu"][number % num_saved].clone())  # torch crashed on a view
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"][number % num_saved].clone())
    if number >= num_saved:
        torch.manual_seed(int(torch.randint(1 << 62, ())) + number)
