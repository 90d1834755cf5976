"""The parameters of torch's FSDP2 in an optimizer: DTensors whose own rows each rank steps.

The ranks agree on whether gradients are finite before a step, and on the weights' scales after it. In a
state dict each part of a state is a DTensor of the rows that its parameter has, so that
`torch.distributed.checkpoint` saves what ranks hold. What gloo cannot send (float8, int16)
is bytes in it. Scales of blocks go by rows as well: a row has those of all blocks that have a part of it. Where blocks cross
rows, they lie elsewhere under another number of ranks, and what is loaded then is decoded and encoded again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octet.worker.fp8.casts import TRAINABLE_DTYPES
from octet.worker.fp8.fsdp import axis_of, elements_of, is_shard, like_shard
from octet.worker.kernels.formats import BLOCK
from octet.worker.kernels.torch_private import first_of_local, foreach_copy_, local_of
from octet.worker.mesh import Axis
from octet.worker.optim.codecs import CODECS, Codec, Parts, select_entries
from octet.worker.optim.origin import Origin
from octet.worker.optim.rules.rule import Rule
from octet.worker.optim.weights import QuantizedWeight


class Shards:
    """The ranks that hold the shards of an optimizer's parameters."""

    def __init__(self) -> None:
        self._axes: dict[str, Axis] = {}
        self._axis_names: dict[Tensor, str] = {}

    def add(self, parameter: Tensor) -> None:
        """Take in a DTensor. Raises ValueError for one that is not cut by rows."""
        axis = axis_of(parameter)
        assert axis.group is not None
        name = axis.group.group_name
        self._axes.setdefault(name, axis)
        self._axis_names[parameter] = name

    def agree_on_finite(self, finite: Tensor) -> Tensor:
        """Return whether the gradients of all ranks are finite. finite: those of this rank, bool ()."""
        for axis in self._axes.values():
            finite = agree_on_finite(axis, finite)
        return finite

    def agree_on_scales(self, optimizer: torch.optim.Optimizer, weights: Sequence[QuantizedWeight]) -> None:
        """Give weights that the ranks have stepped one amax and one scale. All ranks call it together."""
        for name, axis in self._axes.items():
            mine = [weight for weight in weights if self._axis_names.get(weight.parameter) == name]
            owned = [weight.codes.numel() > 0 for weight in mine]
            is_owned = None if all(owned) else torch.tensor(owned, device=axis.device)
            agree_on_weight_scales(optimizer, mine, is_owned, axis)


def agree_on_finite(axis: Axis, finite: Tensor) -> Tensor:
    """Return whether the gradients of all ranks of the axis are finite. finite: those of this rank, bool ()."""
    return axis.max_((~finite).to(axis.device, torch.float32)) == 0


def agree_on_weight_scales(
    optimizer: torch.optim.Optimizer, weights: Sequence[QuantizedWeight], is_owned: Tensor | None, axis: Axis
) -> None:
    """Give each weight the largest amax and scale of the axis; NaN where one is not finite. All ranks call it together.

    is_owned: bool (weights), True for a weight if this rank has stepped some of its elements; None
    for all weights.
    """
    if not weights:
        return
    # All numbers as one tensor, and back in one launch: two weights or two thousand take as many launches.
    held = [number.reshape(()) for weight in weights for number in (weight.amax, weight.dequant_scale)]
    written_W2 = torch.stack(held).view(-1, 2)
    if is_owned is not None:
        written_W2 = torch.where(is_owned[:, None], written_W2, 0.0)
    scales_W = axis.max_(written_W2)[:, 1]
    is_finite_W = scales_W.isfinite()
    scales_W.copy_(torch.where(is_finite_W, scales_W, torch.nan))
    foreach_copy_(held, list(written_W2.flatten().unbind()))
    refined = [index for index, weight in enumerate(weights) if weight.needs_master]
    if refined:
        masters = [optimizer.state[weights[index].parameter]["master_weights"]["dequant_scale"] for index in refined]
        finite = torch.stack([is_finite_W[index] for index in refined])
        foreach_copy_(masters, list(torch.where(finite, torch.stack(masters), torch.nan).unbind()))


def origin_of(parameter: Tensor, index: int) -> Origin:
    """Return the elements that a parameter of the groups holds here. index: of the parameter."""
    return Origin(index, elements_of(parameter).start if is_shard(parameter) else 0, parameter.numel())


def as_shards(parameter: Tensor, state: Mapping[str, Any], weight: QuantizedWeight | None) -> Mapping[str, Any]:
    """Return a parameter's states as DTensors, with the scale and the amax of its codes; as they are for no shard."""
    if not is_shard(parameter):
        return state
    shards: dict[str, Any] = {
        name: {part: _as_shard(parameter, part, held) for part, held in value.items()} if isinstance(value, dict) else value
        for name, value in state.items()
    }
    if weight is not None:
        shards[NUMBERS] = {"dequant_scale": weight.dequant_scale.clone(), "amax": weight.amax.clone()}
    if _row_size(parameter) % BLOCK and any(_has_blocks(value) for value in state.values()):
        shards[CUT] = torch.tensor(axis_of(parameter).size)
    return shards


def _has_blocks(value: Any) -> bool:
    return isinstance(value, dict) and any(part != "codes" and held.dim() for part, held in value.items())


def _row_size(parameter: Tensor) -> int:
    return parameter.numel() // max(len(parameter), 1)


def _blocks_of_rows(num_rows: int, row_size: int, device: torch.device) -> Tensor:
    """Return the blocks that have a part of each row (num_rows, n), int64; n as of the row that most blocks can cross.

    Rows and blocks begin together. The last rows may name blocks that are not there.
    """
    first = torch.arange(num_rows, device=device) * row_size // BLOCK
    return first[:, None] + torch.arange((row_size + BLOCK - 2) // BLOCK + 1, device=device)


def _as_shard(parameter: Any, part: str, held: Tensor) -> Tensor:
    """Return a part of a state, 1-D, as a DTensor; a scale () of the whole is the same on all ranks."""
    if held.dim() == 0:
        return held
    rows, row_size = len(local_of(parameter)), _row_size(parameter)
    if part == "codes":
        return like_shard(parameter, _sendable(held.view(rows, *parameter.shape[1:])))
    if row_size % BLOCK == 0:
        return like_shard(parameter, _sendable(held.view(rows, row_size // BLOCK)))
    blocks = _blocks_of_rows(rows, row_size, held.device)
    return like_shard(parameter, _sendable(held[blocks.clamp_(max=len(held) - 1)]))


def _sendable(held: Tensor) -> Tensor:
    """Return what every backend can send: bytes in the place of float8 and int16, which gloo has not."""
    return held.view(torch.uint8) if held.dtype in (torch.float8_e4m3fn, torch.int16) else held


def local_parts(parts: Parts, origin: Origin, num_held: int, codec: Codec | None) -> Parts:
    """Return this rank's entries of saved parts, 1-D; parts of the whole stay. codec: of the state; None: a master weight.

    num_held: elements that this rank holds. Raises ValueError for what other cuts have saved.
    """
    codes = parts["codes"]
    if not is_shard(codes):
        if codes.numel() != num_held and len(parts) > 1 + (codec is None) and origin.first_element % BLOCK:
            raise ValueError(
                f"a state of a whole parameter is cut at element {origin.first_element}, inside of a block of {BLOCK}; "
                "allowed: states saved by as many ranks, or rows that blocks do not cross. Save them under fully_shard."
            )
        return parts
    local = {name: local_of(part).reshape(-1) for name, part in parts.items()}
    if local["codes"].numel() != num_held:
        raise ValueError(
            f"a saved state has {local['codes'].numel()} elements on this rank; allowed: {num_held}, as its parameter. Load it "
            "by torch.distributed.checkpoint, into what get_state_dict returns for this model."
        )
    if codec is None:
        return local | {"dequant_scale": parts["dequant_scale"]}
    return _by_blocks(local, _row_size(codes), codec)


def _by_blocks(parts: Parts, row_size: int, codec: Codec) -> Parts:
    """Return parts, 1-D, whose scales go by rows, as the codec has them: by blocks that begin with the first row."""
    held = {name: parts[name].reshape(-1).view(part.dtype) for name, part in codec.parts.items()}
    if row_size % BLOCK == 0 or len(held) == 1:
        return held
    num_held = held["codes"].numel()
    blocks = torch.arange(-(-num_held // BLOCK), device=held["codes"].device)
    rows = blocks * BLOCK // row_size
    places = rows * _blocks_of_rows(1, row_size, blocks.device).numel() + blocks - rows * row_size // BLOCK
    return {name: part if name == "codes" else part[places] for name, part in held.items()}


def take_rows(parts: Parts, num_ranks: Any, codec: Codec) -> tuple[Parts, Codec]:
    """Return the parts of a state that went by rows in blocks as a parameter has them, and their codec.

    Where the blocks of `num_ranks` ranks (None: blocks that do not cross rows) begin at other elements, they are the values in
    fp32. Parts of a shard that are as its own stay DTensors; a whole state becomes 1-D, and other states stay as they are.
    """
    codes = parts["codes"]
    if is_shard(codes):
        per_rank = len(codes) if num_ranks is None else -(-len(codes) // int(num_ranks))
        if num_ranks is None or per_rank == -(-len(codes) // axis_of(codes).size):
            return parts, codec
        return _values_of_rows(parts, per_rank, first_of_local(codes)[0], codec), CODECS["fp32"]
    if codes.dim() < 2 and all(part.dim() < 2 for part in parts.values()):
        return parts, codec
    if num_ranks is None or int(num_ranks) == 1:
        return _by_blocks(parts, _row_size(codes), codec), codec
    return _values_of_rows(parts, -(-len(codes) // int(num_ranks)), 0, codec), CODECS["fp32"]


def _values_of_rows(parts: Parts, rows_of_rank: int, first_row: int, codec: Codec) -> Parts:
    """Decode this rank's rows, whose blocks began at each `rows_of_rank`-th row. first_row: of this rank."""
    row_size = _row_size(parts["codes"])
    local = {name: local_of(parts[name]).view(part.dtype) for name, part in codec.parts.items()}
    codes = local.pop("codes")
    num_rows, device = len(codes), codes.device
    rows = torch.arange(num_rows, device=device) + first_row
    columns = (rows % rows_of_rank * row_size % BLOCK)[:, None] + torch.arange(row_size, device=device)
    bits = _sendable(codes).reshape(num_rows, row_size)
    wide = bits.new_zeros(num_rows, _blocks_of_rows(1, row_size, device).numel() * BLOCK).scatter_(1, columns, bits)
    values = codec.decode({"codes": wide.view(codes.dtype).view(-1)} | {name: part.reshape(-1) for name, part in local.items()})
    return {"codes": values.view(wide.shape).gather(1, columns).view(-1)}


NUMBERS = "weight_numbers"
"""The scale and the amax of a shard's codes, among the states of its parameter."""
CUT = "num_ranks"
"""The number of ranks between which the rows of a shard's parameter were cut, among its states."""


def check_states(saved: Mapping[str, Any], rule: Rule) -> None:
    """Reject the states of another rule."""
    names = [name for name in saved if name not in ("step", "master_weights", NUMBERS, CUT)]
    if set(names) != set(rule.state_codecs):
        raise ValueError(
            f"the saved states are {', '.join(names)}; allowed: {', '.join(rule.state_codecs)}, the states of {rule.name}. "
            "Continue with the optimizer that saved them, or start this one without them."
        )


def check_parts(name: str, parts: Parts, codec: Codec) -> None:
    """Reject a saved state that consists of other parts; the kernel would otherwise read a null pointer."""
    if set(parts) != set(codec.parts):
        raise ValueError(
            f"the saved {name} consists of {', '.join(parts)}; allowed: {', '.join(codec.parts)}. Another version of Octet "
            "saved it: finish the run with that version, or start a new optimizer from the saved weights."
        )


def entries_of_piece(parts: Parts, elements: range, num_elements: int) -> Parts:
    """Return the entries of saved parts for some elements of a parameter; all if the parts are of a piece already.

    num_elements: of the whole parameter.
    """
    if parts["codes"].numel() != num_elements or len(elements) == num_elements:
        return parts
    return select_entries(parts, elements)


def copy_parts(parts: Parts, device: torch.device) -> dict[str, Tensor]:
    """Copy the tensors of a state to a device."""
    return {name: part.to(device, copy=True) for name, part in parts.items()}


def wrong_dtype(parameter: Tensor) -> str:
    """Say that a parameter cannot be trained in its dtype."""
    return f"a parameter has dtype {parameter.dtype}; allowed: {', '.join(map(str, TRAINABLE_DTYPES))}."
