"""Continue from a checkpoint that was made at any level.

Where both levels hold the weights in the same way, everything is loaded bit for bit. Otherwise a weight's finest values (of its
master weight, or of codes with their residual) are encoded as the new level holds them, and the moments by its codecs.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.bf16 import HalfLinear
from octet.worker.fp8.layout import layout_of
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.fp8.stored import CODES, drop_history, exact_state_dict, put_values
from octet.worker.mesh import Axis, SavedTensor
from octet.worker.mesh.saved import read_now
from octet.worker.models.blocks import repeated_blocks
from octet.worker.optim import LowBitOptimizer


def resume(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved_model: dict[str, Any],
    saved_optimizer: dict[str, Any],
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Load the state dicts of a model and its optimizer into a model of the same network at this level or another.

    dtypes: of the tensors in the model's state dict, where that is expensive to make. Tensors that are saved and not read yet
    (`SavedTensor`) are read block by block.
    The state dicts are those of whole tensors; ranks that hold pieces (ZeRO) call this together, and each keeps its own.
    Steps, learning rates and the seed of rounding are those of the checkpoint. What delayed scaling remembers, and which layers
    were demoted, is kept where the new level has it too. Raises ValueError for the states of another optimizer rule.
    """
    has_same_storage = load_model(model, optimizer, saved_model, saved_optimizer, dtypes)
    optimizer.load_state_dict(saved_optimizer)
    if not has_same_storage:
        make_masters(optimizer)


def load_model(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    saved_model: dict[str, Any],
    saved_optimizer: dict[str, Any],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> bool:
    """Load a model's state dict of any level, before the optimizer's. Returns whether both levels hold the weights alike.

    optimizer: maps saved states to parameters; it is not changed. dtypes: as for `resume`.
    """
    dtypes = _tensors_by_name(exact_state_dict(model)) if dtypes is None else dtypes
    has_same_storage = _tensors_by_name(saved_model) == dtypes
    keys = {} if has_same_storage else names_by_key(model, optimizer, saved_optimizer)
    is_read = not any(isinstance(held, SavedTensor) for held in saved_model.values())
    for module, prefix, names in [(model, "", saved_model.keys())] if is_read else _parts(model, saved_model):
        part = {name: read_now(saved_model[name]) for name in names}
        if not has_same_storage:
            part = _for_level_of(model, part, saved_optimizer, keys, is_whole=module is model)
        with _hidden(() if is_read or module is not model else repeated_blocks(model), model):
            module.load_state_dict({name.removeprefix(prefix): held for name, held in part.items()})
    return has_same_storage


def _parts(model: nn.Module, saved: Mapping[str, Any]) -> Iterator[tuple[nn.Module, str, list[str]]]:
    """Yield each block of a model with its prefix and its names in a saved state, then the model with the other names."""
    blocks, others = set(repeated_blocks(model)), dict.fromkeys(saved)
    for module_name, module in model.named_modules():
        if module in blocks:
            prefix = f"{module_name}."
            names = [name for name in saved if name.startswith(prefix)]
            for name in names:
                del others[name]
            yield module, prefix, names
    yield model, "", list(others)


@contextmanager
def _hidden(blocks: Collection[nn.Module], model: nn.Module) -> Iterator[None]:
    """Inside, a model's state dict has no entries of its blocks."""
    hidden = set(blocks)
    owners = [module for module in model.modules() if hidden.intersection(module._modules.values())]
    before = [owner._modules for owner in owners]
    for owner in owners:
        owner._modules = {name: child for name, child in owner._modules.items() if child not in hidden}
    try:
        yield
    finally:
        for owner, modules in zip(owners, before, strict=True):
            owner._modules = modules


def make_masters(optimizer: torch.optim.Optimizer) -> None:
    """Make the master weights of what was loaded now, so that no fp32 values wait for the first step."""
    if isinstance(optimizer, LowBitOptimizer):
        for parameter in list(optimizer.state):
            optimizer.follow_weight(parameter)


def _tensors_by_name(state: dict[str, Any]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in state.items()}


def names_by_key(model: nn.Module, optimizer: torch.optim.Optimizer, saved_optimizer: dict[str, Any]) -> dict[str, int]:
    """The key of each parameter's states, by the parameter's name; groups list their parameters in the same order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pieces: dict[Tensor, nn.Parameter] = getattr(optimizer, "pieces", {})  # held instead of parameters under ZeRO
    for group, saved_group in zip(optimizer.param_groups, saved_optimizer["param_groups"], strict=True):
        if len(group["params"]) != len(saved_group["params"]):
            raise ValueError(
                f"the checkpoint's optimizer has {len(saved_group['params'])} parameters in a group, this job's "
                f"{len(group['params'])}; allowed: the same. Levels that multiply in FP8 hold the experts of a mixture one by "
                "one, the others in stacks: continue at a level of the same kind, or start from an export of the checkpoint."
            )
    names |= {id(piece): names[id(parameter)] for parameter, piece in pieces.items()}
    return {
        names[id(parameter)]: key
        for group, saved_group in zip(optimizer.param_groups, saved_optimizer["param_groups"], strict=True)
        for parameter, key in zip(group["params"], saved_group["params"], strict=True)
    }


def _for_level_of(
    model: nn.Module, saved_model: dict[str, Any], saved_optimizer: dict[str, Any], keys: dict[str, int], *, is_whole: bool
) -> dict[str, Any]:
    """The saved state, or a block's part of it, with values in the place of codes, and without what layers do not remember.

    is_whole: it has what belongs to the model itself.
    """
    state = dict(saved_model)
    for name in saved_model:
        if name.rpartition(".")[2] == CODES:
            prefix = name.removesuffix(CODES)
            saved_states = saved_optimizer["state"].get(keys.get(prefix + "weight"), {})
            put_values(state, prefix, _master_values(saved_states, saved_model[name].shape))
    for name, module in model.named_modules(remove_duplicate=False):
        if layout_of(module) is not None and not isinstance(module, (Float8Linear, HalfLinear)):
            drop_history(state, f"{name}." if name else "")
    if not is_whole:
        return state
    own_scaling = dict(model.named_buffers()).get(STATE_BUFFER)
    if own_scaling is None:
        state.pop(STATE_BUFFER, None)
    elif STATE_BUFFER not in state:
        state[STATE_BUFFER] = own_scaling.clone()
        state[STATE_BUFFER][2] = saved_optimizer.get("num_skipped_steps", 0)  # skipped before: no reason to halve the scale
    return state


def _master_values(saved_states: dict[str, Any], shape: torch.Size) -> Tensor | None:
    master = saved_states.get("master_weights")
    return None if master is None else kernels.dequantize(master["codes"], master["dequant_scale"]).view(shape)


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
