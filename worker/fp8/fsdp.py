"""Let shards of torch's FSDP2 (`fully_shard`) hold codes: rows of a weight, with the scale and the amax of the whole.

`fully_shard` cuts a weight by ops that read values, so a shard arrives in fp32. The layer notices when
FSDP2 puts it in the weight's place, and gives it the codes of its rows instead: they are exact, and
nothing else refers to the fp32 values, which are freed. `Float8Weight` has the hooks that FSDP2 calls
around a gather; codes are what travels. What writes into a shard agrees on the amax of the whole
weight, so all ranks write together, as they do with any DTensor.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.fp8.weight import Float8Weight
from octet.worker.kernels.torch_private import first_of_local, local_of, set_local
from octet.worker.mesh import Axis


def is_cut(module: nn.Module) -> bool:
    """Return True for a module that `fully_shard` has got."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # loading it takes a second, and who has used it has loaded it
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def put_shards_back(model: nn.Module) -> None:
    """Put shards in the place of what FSDP2 has gathered for a pass, as its own state dicts do; a later pass gathers again.

    A weight of E4M3 codes that is gathered lacks the digits of its master weight.
    """
    for module in model.modules():
        if is_cut(module):
            gathered: Any = module
            gathered.reshard()


def is_shard(tensor: object) -> bool:
    """Return True for a DTensor."""
    return isinstance(tensor, Tensor) and local_of(tensor) is not tensor


def holds_codes(parameter: object) -> bool:
    """Return True for a weight that is held as codes, or a shard of one."""
    return isinstance(parameter, Tensor) and type(local_of(parameter)) is Float8Weight


def hold_codes_in_shard(weight: Float8Weight, shard: Any) -> None:
    """Let a DTensor, which FSDP2 has cut from the values of a weight, hold the codes of the same rows.

    Raises ValueError for a cut that is not of rows, a weight without memory, a weight that FSDP2 has
    gathered, and one that an optimizer of ours holds.
    """
    name = f"fully_shard got a weight of codes of shape {tuple(weight.shape)}"
    if weight.state.is_gathered:
        raise ValueError(
            f"{name} and shards it otherwise after a forward pass; allowed: reshard_after_forward=True or False, no number."
        )
    if weight.state.is_stepped:
        raise ValueError(
            f"{name} that an optimizer holds already; allowed: none yet, as FSDP2 replaces the weights by shards. Call "
            "initialize(model, None, ...), then fully_shard, then make the optimizer, then follow_optimizer(model, optimizer)."
        )
    if weight.codes.is_meta or weight.dequant_scale.dim():
        raise ValueError(
            f"{name} on {weight.device}, with a scale of shape {tuple(weight.dequant_scale.shape)}; allowed: one scale, and "
            "values in memory. Build the model on its device, or load it there before fully_shard."
        )
    axis = axis_of(shard)
    values = local_of(shard)
    num_rows, padded_rows, first = len(values), -(-len(weight) // axis.size), first_of_local(shard)[0]

    def padded(part: Tensor) -> Tensor:
        size = (padded_rows, *part.shape[1:])
        whole = torch.zeros(size, dtype=part.dtype, device=values.device, pin_memory=values.is_pinned())
        whole[:num_rows].copy_(part[first : first + num_rows])
        return whole

    parts = padded(weight.codes), None if weight.residual is None else padded(weight.residual)
    dequant_scale, amax = (number.to(values.device, copy=True) for number in (weight.dequant_scale, weight.values_amax))
    made = Float8Weight.shard(parts, num_rows, dequant_scale, amax, axis.max_)
    if weight.state.wide is not None:
        made.state.wide = weight.state.wide[first : first + num_rows].to(values.device, copy=True)
        made.state.is_assigned = weight.state.is_assigned
    set_local(shard, made)
    values.untyped_storage().resize_(0)


def axis_of(shard: Any) -> Axis:
    """Return the ranks over which a DTensor's rows are divided. Raises ValueError for another placement."""
    dims = [dim for dim, placement in enumerate(shard.placements) if not placement.is_replicate()]
    if [str(shard.placements[dim]) for dim in dims] != ["S(0)"]:
        raise ValueError(
            f"a parameter of shape {tuple(shard.shape)} is placed as {shard.placements}; allowed: one cut of the first "
            "dimension, over any ranks, and copies. Leave out shard_placement_fn and other parallelism by DTensor."
        )
    mesh, dim = shard.device_mesh, dims[0]
    return Axis("fsdp", mesh.size(dim), mesh.get_local_rank(dim), local_of(shard).device, mesh.get_group(dim))


def elements_of(shard: Any) -> range:
    """Return the elements of the whole, flattened, that this rank's rows are."""
    local = local_of(shard)
    row_size = shard.numel() // len(shard) if len(shard) else 0
    first = first_of_local(shard)[0] * row_size if local.numel() else shard.numel()
    return range(first, first + local.numel())


def like_shard(shard: Any, local: Tensor) -> Tensor:
    """Return a DTensor of other rows of this rank, placed as a parameter is."""
    from torch.distributed.tensor import DTensor

    shape = torch.Size((len(shard), *local.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    made: Tensor = DTensor.from_local(local, shard.device_mesh, shard.placements, run_check=False, shape=shape, stride=stride)
    return made


@torch.no_grad()
def values_of_shard(shard: Any) -> Tensor:
    """Return a DTensor of plain fp32 values for one of codes; another DTensor itself, detached."""
    local = local_of(shard)
    return like_shard(shard, local.dequantize()) if type(local) is Float8Weight else shard.detach()


def whole_values(shard: Any) -> Tensor:
    """Return the values of a whole DTensor. All ranks call it together."""
    whole: Tensor = values_of_shard(shard).full_tensor()
    return whole


@torch.no_grad()
def load_into_shard(shard: Tensor, values: Tensor) -> None:
    """Write values, of one placement or this rank's own, into a shard of codes, exactly. All ranks call it together.

    Codes return bit for bit where an optimizer has loaded their scale and amax; else fp32 values wait beside them.
    """
    weight, own = local_of(shard), local_of(values)
    assert type(weight) is Float8Weight
    numbers, weight.state.saved_numbers = weight.state.saved_numbers, None
    if numbers is None or own.shape != weight.shape:
        shard.copy_(values)
        return
    weight.assign(own, *numbers)
    if weight.state.wide is None and not torch.equal(weight.dequantize(), own):
        weight.state.wide, weight.state.is_assigned = own.clone(), False
