"""Continue from a checkpoint that was made at any level.

Where both levels hold the weights in the same way, everything is loaded bit for bit. Otherwise a weight's finest values (of its
master weight, or of codes with their residual) are encoded as the new level holds them, and the moments by its codecs.
A tensor of several matrices is split where this model has a layer for each (`fp8/stacks.py`).
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.bf16 import HalfLinear
from octet.worker.fp8.layout import layout_of
from octet.worker.fp8.linear import Float8Linear
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.fp8.stacks import Stack, stacks_of
from octet.worker.fp8.stored import CODES, drop_history, exact_state_dict, put_values
from octet.worker.mesh import Axis, SavedTensor
from octet.worker.mesh.saved import SavedStates, read_now
from octet.worker.models.blocks import repeated_blocks
from octet.worker.optim import LowBitOptimizer
from octet.worker.optim.states import part_of_state


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
    saved_model, saved_optimizer = split_stacks(model, optimizer, saved_model, saved_optimizer)
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


def split_stacks(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved_model: dict[str, Any], saved_optimizer: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the stacks of saved state dicts that this model holds as layers of their own, values and moments exactly.

    Levels without FP8 save stacks, and so did all levels before they converted torch's own attention. Other state dicts are
    returned as they are. Raises ValueError for another number of parameters.
    """
    stacks = {stack.name: stack for stack in stacks_of(model) if stack.name in saved_model}
    if not stacks:
        return saved_model, saved_optimizer
    matrices: dict[str, Any] = {}
    for name, saved in saved_model.items():
        stack = stacks.get(name)
        parts = {name: saved} if stack is None else {part: _matrix(saved, stack, i) for i, part in enumerate(stack.parts)}
        matrices.update(parts)
    place = {part: (stack, index) for stack in stacks.values() for index, part in enumerate(stack.parts)}
    names, states = _names(model, optimizer), saved_optimizer["state"]
    readers: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    for group, saved_group in zip(optimizer.param_groups, saved_optimizer["param_groups"], strict=True):
        own = [names[id(parameter)] for parameter in group["params"]]
        firsts = [name for name in own if name not in place or place[name][1] == 0]
        _check_length(len(saved_group["params"]), len(firsts))
        keys, numbers, key = iter(saved_group["params"]), list[int](), None
        for name in own:
            stack, index = place.get(name, (None, 0))
            key = next(keys) if index == 0 else key
            numbers.append(sum(len(each["params"]) for each in groups) + len(numbers))
            if key in states:
                matrix = None if stack is None else (index, len(stack.parts))
                readers[numbers[-1]] = partial(_states_of, states, key, matrix, saved_group)
        groups.append(saved_group | {"params": numbers})
    return matrices, saved_optimizer | {"state": SavedStates(readers), "param_groups": groups}


def _matrix(saved: Any, stack: Stack, index: int) -> Any:
    """Return one matrix of a saved stack; of one that is not read yet, a tensor to be read later."""
    if not isinstance(saved, SavedTensor):
        return stack.split(saved)[index]
    shape = tuple(stack.split(torch.empty(saved.shape, device="meta"))[index].shape)
    return replace(saved, shape=shape, read=lambda: stack.split(saved.read())[index].clone())


def _states_of(states: Mapping[Any, Any], key: Any, matrix: tuple[int, int] | None, group: dict[str, Any]) -> dict[str, Any]:
    """Return the saved states of a parameter, or of one matrix of a stack. matrix: its number, and how many there are."""
    saved: dict[str, Any] = states[key]
    if matrix is None:
        return saved
    return {name: part_of_state(held, *matrix, str(group.get(f"{name}_codec", "fp32"))) for name, held in saved.items()}


def make_masters(optimizer: torch.optim.Optimizer) -> None:
    """Make the master weights of what was loaded now, so that no fp32 values wait for the first step."""
    if isinstance(optimizer, LowBitOptimizer):
        for parameter in list(optimizer.state):
            optimizer.follow_weight(parameter)


def _tensors_by_name(state: dict[str, Any]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in state.items()}


def names_by_key(model: nn.Module, optimizer: torch.optim.Optimizer, saved_optimizer: dict[str, Any]) -> dict[str, int]:
    """The key of each parameter's states, by the parameter's name; groups list their parameters in the same order."""
    names = _names(model, optimizer)
    for group, saved_group in zip(optimizer.param_groups, saved_optimizer["param_groups"], strict=True):
        _check_length(len(saved_group["params"]), len(group["params"]))
    return {
        names[id(parameter)]: key
        for group, saved_group in zip(optimizer.param_groups, saved_optimizer["param_groups"], strict=True)
        for parameter, key in zip(group["params"], saved_group["params"], strict=True)
    }


def _names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Return the names of what an optimizer holds, by id."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pieces: dict[Tensor, nn.Parameter] = getattr(optimizer, "pieces", {})  # held instead of parameters under ZeRO
    return names | {id(piece): names[id(parameter)] for parameter, piece in pieces.items()}


def _check_length(num_saved: int, num_own: int) -> None:
    if num_saved != num_own:
        raise ValueError(
            f"the checkpoint's optimizer has {num_saved} parameters in a group, this job's {num_own}; allowed: the same. "
            "Levels that multiply in FP8 hold the experts of a mixture one by one, the others in stacks: continue at such a "
            "level, or start from an export of the checkpoint."
        )


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
