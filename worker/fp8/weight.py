"""A weight that is its values: an fp32 tensor for whoever looks at it, held as codes, a scale and what refines them.

Our own products, optimizer, loaders and collectives take the parts: `codes`, `dequant_scale`, `values_amax`, `residual`. Any
other op of torch reads decoded values; one that writes, into the weight or a view of it, has the result encoded again. Parts
are changed in place, so that captured graphs, compiled graphs and aliases stay valid.

Loading, `fill_` and collectives round to nearest. Any other write also keeps its fp32 result, `state.wide`, until our
optimizer's next step rounds it stochastically: to nearest, small changes are lost, all 200 of an average that is made by
`mine.copy_(0.999 * mine + 0.001 * theirs)`. Readers see `wide` while it is there.

A graph of torch.compile gets the parts, and no `wide` or master weight. So torch breaks it at a write, and at a read of values
that are finer than the codes, and runs these eagerly; with fullgraph=True they are refused. So are, in a CUDA graph, writes
and reads of `wide`, whose memory is freed at the next step.
"""

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, TypeGuard

import torch
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8 import collectives
from octet.worker.fp8.weights import EncodedWeight, amax_of, decode_values, encode_values
from octet.worker.kernels.formats import E4M3, FP16, Format
from octet.worker.kernels.torch_private import (
    base_of,
    correct_aliasing,
    disabled_torch_function,
    is_parameter,
    is_traced,
    keeping_versions,
    local_of,
    make_wrapper_subclass,
    mark_as_parameter,
    never_compiled,
    raise_for_raw_pointers,
    restore_hooks,
    schema_of,
    swap_tensors,
    tree_leaves,
    tree_map,
    tree_map_only,
    version_of,
)

aten = torch.ops.aten
ENCODED_DTYPES = (FP16.dtype, E4M3.dtype)


@dataclass(eq=False)
class WeightState:
    """The part of a weight that all its aliases and views share.

    codes, residual: of the whole weight. wide: fp32, in its shape, the result of a write that the codes round. is_assigned:
    `wide` are finished values, to be rounded to nearest. master: FP16 codes, flat, with their scale, which the optimizer keeps
    for E4M3 codes. elements: those that `master`, or a residual of its own, refines, where ranks divide it. has_master: values
    that are assigned wait in `wide` for the optimizer. has_new_codes: codes were loaded since the optimizer's last step.
    is_replaced: a layer holds another parameter now. reduce_amax: makes an amax that of all ranks that hold shards.
    read_whole: returns the finest values of a weight that ranks divide; all call it together. padded: codes and residual with
    the empty rows by which FSDP2 makes all ranks' shards alike. is_gathered: FSDP2 has put it together for a pass. is_stepped:
    an optimizer of ours holds it. saved_numbers: scale and amax of values that may be loaded next. num_sent: tensors
    that FSDP2 gathers. is_finer_outside: of a graph that has these parts alone. after_write: is called after each change.
    """

    codes: Tensor
    residual: Tensor | None
    wide: Tensor | None = None
    is_assigned: bool = False
    master: dict[str, Tensor] | None = None
    elements: range | None = None
    own_residual: Tensor | None = None
    has_master: bool = False
    has_new_codes: bool = False
    is_replaced: bool = False
    reduce_amax: Callable[[Tensor], Tensor] | None = None
    read_whole: Callable[[], Tensor] | None = None
    padded: tuple[Tensor, Tensor | None] | None = None
    is_gathered: bool = False
    is_stepped: bool = False
    saved_numbers: tuple[Tensor, Tensor] | None = None
    num_sent: int = 0
    is_finer_outside: bool = False
    entries: list["Entry"] = field(default_factory=list)
    after_write: Callable[[], None] | None = None

    def take_back(self) -> None:
        """Take over what was written into entries of state dicts."""
        for entry in tuple(self.entries):
            entry.take_back(self)

    def check_has_own_memory(self) -> None:
        """Raise ValueError before a write that another tensor, whose memory the weight would share in torch, does not see."""
        if any(entry.is_data for entry in self.entries):
            raise ValueError(
                f"a weight of shape {tuple(self.codes.shape)} is written that `data = …` moved into a part of another tensor, "
                "which would not change: codes have memory of their own. Allowed: data = part.clone(), writes into the other "
                "tensor, and ZeroRedundancyOptimizer without parameters_as_bucket_view=True; octet.parallelize(model, "
                "optimizer, zero_stage=1) divides an optimizer's states."
            )

    def values(self, dequant_scale: Tensor) -> Tensor:
        """Return the fp32 values of the whole weight, as precisely as this process holds them all; maybe `wide` itself."""
        if self.wide is not None:
            return self.wide
        if self.master is not None and self.elements is None:
            return _with_strides(_of_master(self.master, self.codes), self.codes)
        return _with_strides(_decoded(self.codes, dequant_scale, self.residual), self.codes)

    @property
    def is_refined_by_ranks(self) -> bool:
        """True if ranks divide what refines the codes, so that none can read the values alone."""
        return self.read_whole is not None and self.codes.dtype == E4M3.dtype and self.residual is None

    @property
    def is_finer(self) -> bool:
        """True if the values are finer than those of codes and residual."""
        return self.wide is not None or self.master is not None or self.is_finer_outside

    def check_is_outside_of_graphs(self, verb: str) -> None:
        """Raise NotImplementedError in a graph; torch.compile takes it as a place where a graph ends, if it may end there."""
        is_captured = self.codes.is_cuda and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if is_captured or is_traced(self.codes):
            kind = "CUDA graph" if is_captured else "compiled graph"
            raise NotImplementedError(
                f"a weight of shape {tuple(self.codes.shape)} held as codes is {verb} inside of a {kind}, which has its codes, "
                "and not the finer values beside them. Allowed: do it outside; torch.compile without fullgraph=True does it "
                "between two graphs."
            )

    @property
    def waits_for_optimizer(self) -> bool:
        """True if values that are assigned wait in `wide`, until the optimizer makes of them what refines the codes."""
        return self.has_master or (self.own_residual is not None and self.residual is None)


class Entry:
    """The values of a weight in somebody's state dict, which torch's users may write: timm's averages do.

    A write is found by the tensor's version: when the weight is read or written, when its layer multiplies, and when the entry
    is released. A tensor that a weight was moved into, by `data = part of it`, is an entry too: torch lets both share memory.
    """

    def __init__(self, weight: "Float8Weight", values: Tensor, owner: Tensor | None = None, *, is_data: bool = False) -> None:
        """owner: the tensor that people hold, if the values are a part of it. is_data: the weight was moved into it."""
        self.is_data = is_data
        self.values, self.numbers = values.detach(), (weight.dequant_scale, weight.values_amax)
        self.versions = version_of(self.values), version_of(weight.state.codes)
        state = weakref.ref(weight.state)
        self.reference = weakref.ref(values if owner is None else owner, lambda _: self._release(state()))

    def take_back(self, state: WeightState) -> None:
        """Write into the weight what was written into the entry."""
        seen, seen_codes = self.versions
        self.versions = version_of(self.values), version_of(state.codes)
        if seen == self.versions[0]:
            self.versions = seen, seen_codes
        elif seen_codes != self.versions[1]:
            warnings.warn(
                f"an entry of shape {tuple(self.values.shape)} of a state dict was written after its weight had changed, so "
                "the weight does not change; write into the entries of a new model.state_dict(), or into the parameters.",
                stacklevel=2,
            )
        else:
            weight = Float8Weight(state.codes, *self.numbers, state.residual, state)
            with torch.no_grad():
                _encode_base(weight, self.values.clone(), is_finished=False)
            self.versions = self.versions[0], version_of(state.codes)

    def _release(self, state: WeightState | None, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if state is not None and self in state.entries and not is_ending():
            state.entries.remove(self)
            self.take_back(state)


class Float8Weight(Tensor):
    """Codes in FP16 or E4M3 with a scale, seen by torch as an fp32 tensor of the same shape.

    dequant_scale, values_amax: fp32 (); (E, 1, 1) for a stack of E weights (E, N, K) with a scale each.
    residual: INT8, refines E4M3 codes. `value = codes × dequant_scale`.
    """

    codes: Tensor
    dequant_scale: Tensor
    values_amax: Tensor
    residual: Tensor | None
    state: WeightState

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        codes: Tensor,
        dequant_scale: Tensor,
        values_amax: Tensor,
        residual: Tensor | None = None,
        state: WeightState | None = None,
        storage_offset: int | None = None,
    ) -> "Float8Weight":
        offset = codes.storage_offset() if storage_offset is None else storage_offset
        made: Float8Weight = make_wrapper_subclass(
            cls, codes.shape, codes.stride(), offset, dtype=torch.float32, device=codes.device
        )
        return made

    def __init__(
        self,
        codes: Tensor,
        dequant_scale: Tensor,
        values_amax: Tensor,
        residual: Tensor | None = None,
        state: WeightState | None = None,
        storage_offset: int | None = None,
    ) -> None:
        """state: of the weight that this is an alias or a view of. storage_offset: of the values, if not that of the codes."""
        if codes.dtype not in ENCODED_DTYPES:
            raise ValueError(f"a weight has codes of {codes.dtype}; allowed: float16, float8_e4m3fn.")
        if residual is not None and (codes.dtype != E4M3.dtype or residual.dtype != torch.int8):
            raise ValueError(f"a residual refines float8_e4m3fn codes by int8; got {codes.dtype} and {residual.dtype}.")
        self.codes, self.dequant_scale, self.values_amax, self.residual = codes, dequant_scale, values_amax, residual
        self.state = WeightState(codes, residual) if state is None else state
        raise_for_raw_pointers(self)

    @classmethod
    def encode(cls, values: Tensor, dtype: torch.dtype, *, has_residual: bool = False) -> "Float8Weight":
        """Return values of any floating dtype rounded to nearest, with one scale."""
        return cls(*encode_values(values, dtype, has_residual=has_residual))

    @classmethod
    def shard(
        cls,
        padded: tuple[Tensor, Tensor | None],
        num_rows: int,
        dequant_scale: Tensor,
        values_amax: Tensor,
        reduce_amax: Callable[[Tensor], Tensor] | None,
    ) -> "Float8Weight":
        """Return the first rows of padded codes, and of their residual, as this rank's shard for FSDP2."""
        codes, residual = padded
        made = cls(codes[:num_rows], dequant_scale, values_amax, None if residual is None else residual[:num_rows])
        made.state.padded, made.state.reduce_amax = padded, reduce_amax
        return made

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return FP16 if self.codes.dtype == FP16.dtype else E4M3

    @property
    def needs_master(self) -> bool:
        """True if the codes alone are too coarse to be trained."""
        state = self.state
        return self.codes.dtype == E4M3.dtype and state.residual is None and state.own_residual is None

    def whole_values(self) -> Tensor:
        """Return the fp32 values as precisely as the ranks that divide the weight hold them; they call it together."""
        return self.dequantize() if self.state.read_whole is None else self.state.read_whole()

    def entry(self) -> Tensor:
        """Return the values for a state dict. What is written into them is written into the weight, as in a plain model."""
        values = self.whole_values()
        if self.state.read_whole is None and not values.is_inference():
            self.state.entries.append(Entry(self, values))
        return values

    def dequantize(self) -> Tensor:
        """Return the fp32 values, in memory of their own."""
        self.state.take_back()
        values = _values(self)
        num_bytes = values.numel() * values.element_size()  # a graph's shapes may be symbols, which `nbytes` does not take
        is_own = self.state.wide is None and values.untyped_storage().nbytes() == num_bytes
        return values if is_own else values.clone()

    @torch.no_grad()
    def assign(self, values: Tensor, dequant_scale: Tensor | None = None, amax: Tensor | None = None) -> None:
        """Hold other values, of the same shape, rounded to nearest.

        They stay in fp32, too, where the weight has such values now, as one that torch's optimizer steps.

        dequant_scale, amax: fp32 (), of the weight that the values were read from. Its codes return bit for bit, unless the
        values were changed so much since that the scale does not fit them.
        """
        self.state.take_back()
        values = values.dequantize() if type(values) is Float8Weight else values.detach()
        values = values.to(self.device, torch.float32).expand(self.shape)
        if dequant_scale is None or amax is None or dequant_scale.shape != self.dequant_scale.shape or self.dequant_scale.dim():
            encoded = _encoded(self, values)
        else:
            scale, known, own = (number.to(self.device) for number in (dequant_scale, amax, amax_of(values)))
            own = own if self.state.reduce_amax is None else self.state.reduce_amax(own)
            fits = (own - known).abs() <= known * 2.0**-self.format.mantissa_bits
            is_known = bool(fits & (own <= scale * self.format.max))
            own_residual = self.state.residual is not None
            numbers = {"amax": known, "dequant_scale": scale} if is_known else {"amax": own}
            encoded = encode_values(values, self.codes.dtype, has_residual=own_residual, **numbers)
        waits = self.state.waits_for_optimizer or self.state.wide is not None
        _hold(self, encoded, values.clone() if waits else None, is_assigned=True)

    def tensors_by_class(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what lies in memory, by classes of `memory_report`. Whatever refines codes counts as a master weight."""
        yield from (("weights", self.codes), ("scales", self.dequant_scale), ("other", self.values_amax))
        master = self.state.master or {}
        for name, part in {"residual": self.residual, "wide": self.state.wide, **master}.items():
            if part is not None:
                yield "scales" if "scale" in name else "master_weights", part

    def hold_codes(self, codes: Tensor, residual: Tensor | None) -> None:
        """Hold codes that lie elsewhere, as ZeRO does. For the weight itself, not for a view; aliases do not follow."""
        self.codes = self.state.codes = codes
        self.residual = self.state.residual = residual

    @torch.no_grad()
    def assign_codes(self, codes: Tensor, dequant_scale: Tensor, amax: Tensor, residual: Tensor | None) -> None:
        """Hold codes of the weight's own format, exactly. A master weight that does not round to them is made again."""
        for part, new in zip(self._parts().values(), (codes, dequant_scale, amax, residual), strict=True):
            if part is not None:
                assert new is not None
                part.copy_(new)
        self.state.wide = None
        _note_new_codes(self.state)

    def move(self, change: Callable[[Tensor], Tensor]) -> bool:
        """Hold the parts that a function makes of them, elsewhere; False if it changes nothing. The object stays the same."""
        parts = {name: None if part is None else change(part) for name, part in self._parts().items()}
        if parts["codes"] is self.codes:
            return False
        gradient = self.grad
        moved = Float8Weight(**parts)  # type: ignore[arg-type]
        self.state.take_back()
        moved.state = replace(self.state, codes=moved.codes, residual=moved.residual, entries=[])
        if moved.state.wide is not None:
            moved.state.wide = change(moved.state.wide)
        self.grad = None
        _become(self, moved)
        self.grad = None if gradient is None else change(gradient)
        return True

    # What torch asks of a tensor without going through an op ---------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        """An alias that autograd does not see. Assigning values encodes them."""
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise ValueError(
                f"a weight of shape {tuple(self.shape)} got data of {tuple(values.shape)}; allowed: the same shape, since its "
                "codes keep their memory. Assign a new parameter to the layer instead."
            )
        self.state.entries = [entry for entry in self.state.entries if not entry.is_data]
        owner = None if type(values) is Float8Weight else base_of(values)
        is_alike = owner is not None and (values.dtype, values.device) == (self.dtype, self.device)
        is_moved = is_alike and torch.equal(self.dequantize(), values)  # into a part of its owner, with the values that it has
        self.detach().copy_(values)
        if is_moved:
            self.state.entries.append(Entry(self, values, owner, is_data=True))

    def data_ptr(self) -> NoReturn:
        """Raise: values have no address."""
        raise ValueError(
            "a weight held as codes has no values in memory, so data_ptr() would be the address of something else; allowed: "
            "weight.codes.data_ptr() with weight.dequant_scale, or weight.dequantize()."
        )

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values."""
        if self.requires_grad and not force:
            raise RuntimeError("can't call numpy() on a weight that requires grad; use weight.detach().numpy()")
        return self.dequantize().numpy(force=force)

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else format(repr(self), spec)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dequantize().__array__(*args, **kwargs)

    def tolist(self) -> Any:
        """Return the values as nested lists."""
        return self.dequantize().tolist()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.dequantize().__dlpack__(*args, **kwargs)

    def share_memory_(self) -> "Float8Weight":
        """Move the parts to shared memory."""
        for part in (*self._parts().values(), self.state.wide):
            if part is not None:
                part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return True if the codes lie in shared memory."""
        return bool(self.codes.is_shared())

    def __copy__(self) -> "Float8Weight":
        return self._like_this(Float8Weight(self.codes, self.dequant_scale, self.values_amax, self.residual, self.state))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            known: Tensor = memo[id(self)]
            return known
        copied = self._copied(lambda part: deepcopy(part.detach(), memo))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self._is_all:
            return self.dequantize().__reduce_ex__(protocol)
        codes = self.codes.contiguous().view(torch.uint8)  # pickle knows no float8
        parts = self._parts() | {"codes": codes}
        kept = {name: part for name, part in parts.items() if part is not None}
        return rebuild, (kept, self.codes.dtype, self._refinements(), self.requires_grad, is_parameter(self))

    @property
    def _is_all(self) -> bool:
        """True for a weight and its aliases, False for a view. A copy of a view is a plain tensor: the scale is the whole's."""
        mine, whole = self.codes, self.state.codes
        return mine is whole or (mine.shape == whole.shape and mine.stride() == whole.stride() and mine.is_set_to(whole))

    def _copied(self, copy: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a weight of its own with copies of the parts, and of what refines them."""
        if not self._is_all:
            return copy(self.dequantize())
        copied = Float8Weight(**{name: None if part is None else copy(part) for name, part in self._parts().items()})  # type: ignore[arg-type]
        copied._refine(tree_map_only(Tensor, copy, self._refinements()))
        return self._like_this(copied)

    def _refinements(self) -> dict[str, Any]:
        """Return what the values are finer by than the codes."""
        state = self.state
        _warn_of_coarse_values(state)
        master = state.master if state.elements is None else None
        refinements = {"wide": state.wide, "is_assigned": state.is_assigned or None, "master": master}
        return {name: part for name, part in refinements.items() if part is not None}

    def _refine(self, refinements: dict[str, Any]) -> None:
        state = self.state
        state.wide, state.is_assigned = refinements.get("wide"), "is_assigned" in refinements
        state.master, state.has_master = refinements.get("master"), "master" in refinements

    def _like_this(self, other: "Float8Weight") -> "Float8Weight":
        """Let another weight require a gradient, and be a parameter, as this one does."""
        other.requires_grad_(self.requires_grad)
        if is_parameter(self):
            mark_as_parameter(other)
        return other

    def _parts(self) -> dict[str, Tensor | None]:
        names = ("codes", "dequant_scale", "values_amax", "residual")
        return {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:  # type: ignore[override]
        name = "Parameter of Float8Weight" if is_parameter(self) else "Float8Weight"
        refined = "" if self.residual is None else " + int8"
        return f"{name}(shape={tuple(self.shape)}, codes={self.codes.dtype}{refined}, device={self.device})"

    # torch's extension points ----------------------------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, _mesh: Any, outer_size: torch.Size, _outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], "GatheredNumbers"]:
        """Return this rank's codes, padded, and what all ranks know: FSDP2 calls it before each gather, on all ranks together.

        module: that holds the weight. E4M3 codes travel as bytes, and with their residual only where the module reads it.
        """
        if self.state.padded is None:
            raise ValueError(
                "FSDP2 gathers a weight of codes that fully_shard has not cut; allowed: weights of layers that initialize "
                "converted. Call initialize before fully_shard, and leave out other parallelism by DTensor."
            )
        if mp_policy.param_dtype not in (None, torch.float32):
            raise ValueError(
                f"FSDP2 would gather a weight of codes in {mp_policy.param_dtype}; allowed: a MixedPrecisionPolicy without "
                "param_dtype, since codes travel as they are. Leave it out; reduce_dtype may stay."
            )
        codes, residual = self.state.padded
        sent = [codes if self.codes.dtype == FP16.dtype else codes.view(torch.uint8)]
        if residual is not None and getattr(module, "reads_residual", True):
            sent.append(residual)
        if self.state.num_sent not in (0, len(sent)):
            raise ValueError(
                "a layer reads the residual of its weight now, which FSDP2 did not gather at first; allowed: no demotion. "
                "Leave out statistics_every and demotion, or load demoted layers before the first pass."
            )
        self.state.num_sent = len(sent)
        return tuple(sent), GatheredNumbers(outer_size[0], self.codes.dtype, self.dequant_scale, self.values_amax)

    def fsdp_post_all_gather(
        self,
        gathered: Sequence[Tensor],
        numbers: "GatheredNumbers",
        _param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple["Float8Weight", tuple[Tensor, ...]] | None:
        """Return the whole weight, and the tensors that FSDP2 frees with it. FSDP2 calls it after each gather.

        out: the weight of an earlier gather, whose codes FSDP2 has gathered again: only its scale and amax are set.
        """
        if out is not None:
            assert type(out) is Float8Weight
            mine, new = (out.dequant_scale, out.values_amax), (numbers.dequant_scale, numbers.amax)
            with torch.no_grad(), keeping_versions(mine):
                for part, value in zip(mine, new, strict=True):
                    part.copy_(value)
            return None
        codes = gathered[0].view(numbers.dtype)[: numbers.num_rows]
        residual = gathered[1][: numbers.num_rows] if len(gathered) > 1 else None
        whole = Float8Weight(codes, numbers.dequant_scale.clone(), numbers.amax.clone(), residual)
        whole.state.is_gathered = True
        return whole, tuple(gathered)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[bool, int]]:
        """Return the names of the parts, and what a compiled graph is made for, and made again if it changes.

        A gathered weight keeps its offset, and has codes at another: in the memory that a block's weights share.
        """
        names = [name for name, part in self._parts().items() if part is not None]
        return names, (self.state.is_finer, int(self.storage_offset()))

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], kept: tuple[bool, int], _size: Any, _stride: Any) -> "Float8Weight":
        is_finer, offset = kept
        numbers = parts["dequant_scale"], parts["values_amax"], parts.get("residual")
        made = Float8Weight(parts["codes"], *numbers, storage_offset=offset)
        made.state.is_finer_outside = is_finer
        return made

    @classmethod
    @never_compiled  # where a graph is broken at an op, torch would compile what runs it
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(func, tuple(args), kwargs or {})


class GatheredNumbers(NamedTuple):
    """The numbers of a weight whose codes FSDP2 gathers: rows of the whole, and dtype, scale and amax of its codes."""

    num_rows: int
    dtype: torch.dtype
    dequant_scale: Tensor
    amax: Tensor


def rebuild(
    parts: dict[str, Tensor], dtype: torch.dtype, refinements: dict[str, Any], requires_grad: bool, is_a_parameter: bool
) -> Float8Weight:
    """Make a weight of what was pickled."""
    numbers = parts["dequant_scale"], parts["values_amax"]
    weight = Float8Weight(parts["codes"].view(dtype), *numbers, parts.get("residual"))
    weight._refine(refinements)
    weight.requires_grad_(requires_grad)
    if is_a_parameter:
        mark_as_parameter(weight)
    return weight


torch.serialization.add_safe_globals([rebuild, Float8Weight])


def is_float8_weight(tensor: object) -> TypeGuard[Float8Weight]:
    """Return True for a weight that is held as codes."""
    return type(tensor) is Float8Weight


def stored(parameter: Tensor) -> Tensor:
    """Return the tensor that lies in memory for a parameter, or for a shard of it: a weight's codes, or the parameter."""
    held = local_of(parameter)
    return held.codes if type(held) is Float8Weight else held


def hold(parameter: Tensor, held: Tensor) -> None:
    """Let a parameter lie in other memory: a weight's codes, or the values of another parameter."""
    if type(parameter) is Float8Weight:
        parameter.hold_codes(held, parameter.residual)
    else:
        parameter.data = held


def tensors_in_memory(model: nn.Module) -> Iterator[Tensor]:
    """Yield the plain tensors in which a model's parameters and buffers are held."""
    for parameter in model.parameters():
        yield stored(parameter)
    for parameter in model.parameters():
        if is_float8_weight(parameter):
            yield from (part for name, part in parameter._parts().items() if part is not None and name != "codes")
    yield from model.buffers()


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op of torch with a weight among its arguments."""
    for weight in _weights_in((args, kwargs)):
        if weight.state.entries:
            weight.state.take_back()
            if any(weight is written for written in _weights_in(_written(func, args, kwargs))):
                weight.state.check_has_own_memory()
    if func in _ON_PARTS:
        result = _ON_PARTS[func](func, *args, **kwargs)
        if result is not NotImplemented:
            return result
    if collectives.is_collective(func):
        return _run_collective(func, args, kwargs)
    if func.namespace not in ("aten", "prim", "prims"):
        raise NotImplementedError(
            f"{func} got a weight that is held as codes; allowed: ops of torch, which read and write its values. Give it "
            "weight.dequantize(), and weight.copy_(values) what it has changed."
        )
    if func.is_view or func is aten._unsafe_view.default:
        return _view(func, args, kwargs)
    if _is_list(args) and ("foreach" in str(func) or "fused" in str(func)):  # one weight is wide at a time
        return _run_each(func, args, kwargs)
    return _on_values(func, args, kwargs)


class _Decoded:
    """The values of the weights among an op's arguments; each weight is decoded once."""

    def __init__(self, written: Sequence[Float8Weight]) -> None:
        self.bases: dict[int, Tensor] = {}
        """The whole values by the id of a weight's state."""
        self._changed = {id(weight.state) for weight in written}
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}

    def decode(self, argument: Any) -> Any:
        """Return the values of a weight, and any other argument as it is."""
        if type(argument) is not Float8Weight:
            return argument
        state = argument.state
        if id(state) in self._changed:
            if id(state) not in self.bases:
                self.bases[id(state)] = _values_to_change(argument)
            values = _part_of(self.bases[id(state)], argument)
        else:
            values = _values(argument)
        self._originals[id(values)] = (argument, values)
        return values

    def original(self, result: Tensor) -> Tensor:
        """Return the weight that a tensor was decoded from, and any other tensor as it is."""
        return self._originals.get(id(result), (result,))[0]


def _on_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on fp32 values; encode again the weights that it has written into."""
    written = list(_weights_in(_written(func, args, kwargs)))
    decoded = _Decoded(written)
    result = func(*tree_map(decoded.decode, args), **tree_map(decoded.decode, kwargs))
    if not written:
        return result
    is_finished = func in _FINISHED
    for weight in {id(weight.state): weight for weight in written}.values():
        _encode_base(weight, decoded.bases[id(weight.state)], is_finished=is_finished)
    return tree_map_only(Tensor, decoded.original, result)


def _run_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective on values, wait, and encode what it has written to nearest: ranks with the same values agree.

    Values that the codes round are kept, too: they may be steps of an optimizer on another rank.
    """
    decoded = _Decoded(list(_weights_in(collectives.written_by(func, args, kwargs))))

    def encode(weight: Float8Weight) -> None:
        state, values = weight.state, decoded.bases[id(weight.state)]
        _encode_base(weight, values, is_finished=True)
        if state.wide is None:
            is_exact = torch.equal(state.values(weight.dequant_scale), values)
            state.wide = None if is_exact else values

    return collectives.run_collective(func, args, kwargs, decoded.decode, encode)


def _run_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on lists: once where all is plain, else for one entry at a time."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg]
    ones = [
        tuple([arg[index]] if isinstance(arg, list | tuple) and arg else arg for arg in args) for index in range(len(lists[0]))
    ]
    results = []
    for one in ones:
        has_weight = next(_weights_in((one, kwargs)), None) is not None
        results.append(_on_values(func, one, kwargs) if has_weight else func(*one, **kwargs))
    if results and isinstance(results[0], list | tuple):
        return [entry for result in results for entry in result]
    return None


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a view of the weight that is the op's first argument: the same view of its codes, and of its residual."""
    weight, rest = args[0], args[1:]
    if type(weight) is not Float8Weight or func in _OF_BITS:
        raise NotImplementedError(
            f"{func} cannot view a weight that is held as codes; allowed: views that keep the dtype. Use weight.dequantize()."
        )
    codes = func(weight.codes, *rest, **kwargs)
    residual = None if weight.residual is None else func(weight.residual, *rest, **kwargs)

    def made(codes: Tensor, residual: Tensor | None) -> Float8Weight:
        return Float8Weight(codes, weight.dequant_scale, weight.values_amax, residual, weight.state)

    if isinstance(codes, Tensor):
        return correct_aliasing(func, args, kwargs, made(codes, residual))
    residuals = [None] * len(codes) if residual is None else residual
    return correct_aliasing(func, args, kwargs, [made(*pair) for pair in zip(codes, residuals, strict=True)])


def _values(weight: Float8Weight) -> Tensor:
    """Return a weight's or a view's fp32 values; maybe a view of `wide`."""
    state = weight.state
    _warn_of_coarse_values(state)
    if state.is_finer_outside or state.wide is not None:
        state.check_is_outside_of_graphs("read")
    is_refined = state.wide is not None or (state.master is not None and state.elements is None)
    if not is_refined and weight.dequant_scale.dim() == 0 and weight.codes.is_contiguous():
        return _decoded(weight.codes, weight.dequant_scale, weight.residual)
    return _part_of(state.values(weight.dequant_scale), weight)


def _values_to_change(weight: Float8Weight) -> Tensor:
    """Return the whole weight's values, which a write may change in place. Ranks that divide them call it together."""
    state = weight.state
    if state.wide is not None or not state.is_refined_by_ranks:
        return state.values(weight.dequant_scale)
    assert state.read_whole is not None
    _check_is_here(state.codes)
    return _with_strides(state.read_whole(), state.codes)


def _warn_of_coarse_values(state: WeightState) -> None:
    """Warn who reads values alone that are finer than this rank knows."""
    if state.wide is None and state.is_refined_by_ranks:
        warnings.warn(
            "a weight is read or copied whose master weight or residual ranks divide (ZeRO), so these are the values of its "
            "E4M3 codes, which the products multiply by; octet.plain_state_dict(model) and octet.AveragedModel, called by all "
            "ranks together, read all digits.",
            stacklevel=2,
        )


def _part_of(base: Tensor, weight: Float8Weight) -> Tensor:
    """Return the values that a view shows, as a view of the whole weight's values."""
    whole = weight.state.codes
    if weight.codes.shape == whole.shape and weight.codes.stride() == whole.stride():
        return base
    offset = weight.codes.storage_offset() - whole.storage_offset()
    return base.as_strided(weight.codes.shape, weight.codes.stride(), base.storage_offset() + offset)


def _check_is_here(codes: Tensor) -> None:
    """Raise ValueError where ranks divide a weight that is not gathered."""
    if codes.numel() and 0 in codes.stride() and codes.numel() > 1 and codes.untyped_storage().nbytes() < codes.nbytes:
        raise ValueError(
            f"a weight of shape {tuple(codes.shape)} is divided over the ranks (ZeRO stage 3) and not gathered now; allowed: "
            "reading it inside of its block's passes, model.state_dict() or octet.plain_state_dict(model), called "
            "by all ranks together."
        )
    if codes.numel() and codes.untyped_storage().nbytes() == 0:
        raise ValueError(f"a weight of shape {tuple(codes.shape)} has no memory yet: its data is not allocated.")


def _decoded(codes: Tensor, dequant_scale: Tensor, residual: Tensor | None) -> Tensor:
    """Return the fp32 values of codes."""
    _check_is_here(codes)
    if dequant_scale.dim() == 0:
        return decode_values(codes, dequant_scale, residual, torch.float32)
    residuals = [None] * len(codes) if residual is None else list(residual)
    return torch.stack(
        [
            decode_values(one, scale.reshape(()), fine, torch.float32)
            for one, scale, fine in zip(codes, dequant_scale, residuals, strict=True)
        ]
    )


def _with_strides(values: Tensor, codes: Tensor) -> Tensor:
    """Lay contiguous values out as their codes are, so that a view of codes is found in them by its strides."""
    if codes.is_contiguous():
        return values
    extent = 1 + sum((size - 1) * stride for size, stride in zip(codes.shape, codes.stride(), strict=True))
    return values.new_zeros(extent).as_strided(codes.shape, codes.stride()).copy_(values)


def _of_master(master: dict[str, Tensor], like: Tensor) -> Tensor:
    """Return a master weight's fp32 values in a shape. It may lie in host memory."""
    codes, scale = master["codes"], master["dequant_scale"]
    if codes.device != like.device:
        if like.is_cuda:
            torch.cuda.synchronize(like.device)  # it may be on its way to the host
        codes, scale = codes.to(like.device), scale.to(like.device)
    return decode_values(codes, scale, None, torch.float32).view(like.shape)


def _encode_base(weight: Float8Weight, values: Tensor, *, is_finished: bool) -> None:
    """Hold other values of the whole weight that `weight` shows, or shows a part of."""
    state, is_whole = weight.state, _is_whole(weight)
    state.check_is_outside_of_graphs("written")
    if values.shape != state.codes.shape:
        raise ValueError(
            f"a weight of shape {tuple(state.codes.shape)} held as codes would become {tuple(values.shape)}; allowed: values "
            "of its shape, since its codes keep their memory. Assign a new parameter to the layer instead."
        )
    keeps = state.waits_for_optimizer or not is_finished or (state.wide is not None and not is_whole)
    is_assigned = is_finished and (state.wide is None or state.is_assigned or is_whole)
    _hold(weight, _encoded(weight, values), values if keeps else None, is_assigned=is_assigned)


def _hold(weight: Float8Weight, encoded: EncodedWeight, wide: Tensor | None, *, is_assigned: bool) -> None:
    state = weight.state
    if state.is_gathered:
        raise ValueError(
            f"a weight of shape {tuple(state.codes.shape)} is written that FSDP2 has gathered for a pass, and would be lost; "
            "allowed: writes into its shards. Call reshard() on the module that fully_shard got, or write outside of passes."
        )
    parts = (state.codes, weight.dequant_scale, weight.values_amax, state.residual)
    for part, new in zip(parts, encoded, strict=True):
        if part is not None:
            assert new is not None
            part.copy_(new)
    state.wide, state.is_assigned = wide, is_assigned
    _note_new_codes(state)


def _encoded(weight: Float8Weight, values: Tensor) -> EncodedWeight:
    """Return values in the weight's format, with a scale for each of its scales."""
    state = weight.state
    dtype, has_residual = state.codes.dtype, state.residual is not None
    if weight.dequant_scale.dim() == 0:
        amax = None if state.reduce_amax is None else state.reduce_amax(kernels.compute_amax(values))
        return encode_values(values, dtype, has_residual=has_residual, amax=amax)
    each = [encode_values(one, dtype, has_residual=has_residual) for one in values]
    codes, scales, amaxes, residuals = (list(parts) for parts in zip(*each, strict=True))
    shape = weight.dequant_scale.shape
    return EncodedWeight(
        torch.stack([one.view(torch.uint8) for one in codes]).view(dtype) if dtype == E4M3.dtype else torch.stack(codes),
        torch.stack(scales).view(shape),
        torch.stack(amaxes).view(shape),
        torch.stack(residuals) if has_residual else None,
    )


def _is_whole(weight: Float8Weight) -> bool:
    return weight.codes.numel() == weight.state.codes.numel()


def _note_new_codes(state: WeightState) -> None:
    """Forget a master weight of former values; an optimizer brings its own back if the codes are its rounding."""
    state.master, state.has_new_codes = None, True
    note_write(state)


def note_write(state: WeightState) -> None:
    """Count a change, by which autograd finds that a saved weight is not what it was; nothing is counted below it."""
    parts = [part for part in (state.codes, state.residual) if part is not None and not part.is_inference()]
    torch.autograd.graph.increment_version(parts)
    if state.after_write is not None:
        state.after_write()


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that the op writes into."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return []
    return [
        args[number] if number < len(args) else kwargs.get(parameter.name)
        for number, parameter in enumerate(schema.arguments)
        if parameter.is_write
    ]


def _weights_in(arguments: Any) -> Iterator[Float8Weight]:
    return (leaf for leaf in tree_leaves(arguments) if type(leaf) is Float8Weight)


def _is_list(args: tuple[Any, ...]) -> bool:
    return bool(args) and isinstance(args[0], list | tuple) and len(args[0]) > 0


# Ops that take parts -------------------------------------------------------------------------------------------------------


def _alias(func: Any, weight: Float8Weight) -> Float8Weight:
    made = Float8Weight(weight.codes, weight.dequant_scale, weight.values_amax, weight.residual, weight.state)
    aliased: Float8Weight = correct_aliasing(func, (weight,), {}, made)
    return aliased


def _clone(_func: Any, weight: Float8Weight, *, memory_format: Any = None) -> Tensor:
    """Return a snapshot as a plain tensor, exact and in no need of encoding."""
    values = weight.dequantize()
    return values if memory_format in (None, torch.preserve_format) else values.contiguous(memory_format=memory_format)


def _copy_(_func: Any, target: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copy parts where both are weights of one format and no write waits; else values."""
    if type(target) is not Float8Weight or type(source) is not Float8Weight or target.shape != source.shape:
        return NotImplemented
    if target.codes is source.codes or (target.state is source.state and target.codes.is_set_to(source.codes)):
        return target
    if source.state.wide is not None or source.state.master is not None or not _are_alike(target, source):
        return NotImplemented
    if not _is_whole(target) and target.dequant_scale is not source.dequant_scale:
        return NotImplemented
    if target.state.wide is not None and not _is_whole(target):
        return NotImplemented
    target.state.check_is_outside_of_graphs("written")
    for name, part in target._parts().items():
        if part is not None:
            part.copy_(getattr(source, name), non_blocking)
    state = target.state
    state.wide = source.dequantize() if state.waits_for_optimizer else None
    state.is_assigned = True
    _note_new_codes(state)
    return target


def _are_alike(one: Float8Weight, other: Float8Weight) -> bool:
    has_residual = one.residual is not None
    return one.codes.dtype == other.codes.dtype and has_residual == (other.residual is not None)


def _to_device(_func: Any, weight: Float8Weight, **options: Any) -> Any:
    """Copy a weight to another device, its parts with it; in another dtype it is a plain tensor."""
    if options.get("dtype") not in (None, torch.float32) or options.get("layout") not in (None, torch.strided):
        return NotImplemented
    if not weight._is_all:
        return NotImplemented
    device = options.get("device") or weight.device
    non_blocking = bool(options.get("non_blocking"))

    def to_device(part: Tensor) -> Tensor:
        return part.to(device, non_blocking=non_blocking, copy=True)

    if weight.state.padded is None:
        parts = {name: None if part is None else to_device(part) for name, part in weight._parts().items()}
        moved = Float8Weight(**parts)  # type: ignore[arg-type]
    else:
        codes, residual = weight.state.padded
        padded = to_device(codes), None if residual is None else to_device(residual)
        numbers = to_device(weight.dequant_scale), to_device(weight.values_amax)
        moved = Float8Weight.shard(padded, len(weight), *numbers, weight.state.reduce_amax)
    if not weight.codes.is_meta:
        moved._refine(tree_map_only(Tensor, to_device, weight._refinements()))
    return moved


def _pin(_func: Any, weight: Float8Weight, *args: Any) -> Tensor:
    return weight._copied(lambda part: part.pin_memory())


def _new_zeros(func: Any, weight: Float8Weight, size: Sequence[int], **options: Any) -> Tensor:
    """Return zeros; for a shard in its padded size its own padded parts, into which FSDP2 then copies the shard."""
    padded = weight.state.padded
    if padded is None or any(options.values()) or tuple(size) != padded[0].shape or len(weight) == size[0]:
        return _like(func, weight, size, **options)
    return Float8Weight(padded[0], weight.dequant_scale, weight.values_amax, padded[1], weight.state)


def _like(func: Any, weight: Float8Weight, *args: Any, **options: Any) -> Tensor:
    """Run an op that reads the shape alone."""
    options.setdefault("device", weight.device)
    made: Tensor = func(torch.empty(weight.shape, device="meta"), *args, **options)
    return made


def _is_same_size(_func: Any, one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


_FINISHED = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten._foreach_zero_.default}
_OF_BITS = {aten.view.dtype, aten.view_as_complex.default, aten.view_as_real.default}
_LIKE = (
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty.default,
)  # fmt: skip
_ON_PARTS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _clone,
    aten.copy_.default: _copy_,
    aten._to_copy.default: _to_device,
    aten._pin_memory.default: _pin,
    aten.is_same_size.default: _is_same_size,
    aten.new_zeros.default: _new_zeros,
    **dict.fromkeys(_LIKE, _like),
}


def hold_encoded(parameter: nn.Parameter, encoded: EncodedWeight) -> None:
    """Turn a parameter into a weight that holds encoded values. It stays the same object, in groups and ties.

    Raises ValueError if an autograd graph, or a weak reference, still refers to it.
    """
    gradient, parameter.grad = parameter.grad, None
    _become(parameter, Float8Weight(*encoded))
    parameter.grad = gradient


def _become(parameter: Tensor, weight: Float8Weight) -> None:
    weight.requires_grad_(parameter.requires_grad)
    mark_as_parameter(weight)
    grad_dtype = parameter.grad_dtype if parameter.is_leaf else torch.float32
    of_users = {name: value for name, value in vars(parameter).items() if name not in vars(weight)}
    try:
        swap_tensors(parameter, weight)
    except RuntimeError as error:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} cannot become a weight of codes, or move: {error}; allowed: "
            "parameters that no autograd graph refers to. Delete the loss and outputs of earlier passes, "
            "or call it before the first pass."
        ) from error
    vars(parameter).update(of_users)
    restore_hooks(parameter)
    if grad_dtype is None:
        parameter.grad_dtype = None
