"""Let torch's FSDP2 (`fully_shard`) gather weights as FP8 codes, by torch's extension points for parameters.

A rank holds its rows of a weight in fp32, as a `ShardedWeight`. Before each gather the ranks agree
on the amax of the whole weight; each rank quantizes its rows by it and sends the codes, one byte
per element. The result is a `GatheredWeight`. It holds, bit for bit, the codes that quantizing the
whole weight would have made, and no values, so an op that would read values raises ValueError. The
extension points are those that torchao's `WeightWithDynamicFloat8CastTensor` uses; the scales are
ours, powers of two.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from octet.worker import kernels
from octet.worker.fp8.fallback import Fallback
from octet.worker.fp8.linear import Float8Linear
from octet.worker.kernels.torch_private import make_wrapper_subclass, tree_map_only

_aten = torch.ops.aten
_KEEPING = {
    *(_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten.copy_.default, _aten._to_copy.default),
    *(_aten.empty_like.default, _aten.new_zeros.default, _aten._pin_memory.default),
    *(_aten.as_strided.default, _aten.slice.Tensor, _aten.split.Tensor, _aten.view.default),
}
"""The ops with which torch cuts, pads and moves a parameter. They return `ShardedWeight`s for a `ShardedWeight`."""


class ShardedWeight(Tensor):
    """A weight's values, (N, K) or some rows, that FSDP2 sends as codes; otherwise an ordinary tensor of their dtype."""

    held: Tensor
    """The values."""

    @staticmethod
    def __new__(cls, values: Tensor) -> "ShardedWeight":
        return _wrapper(cls, values, values.dtype)

    def __init__(self, values: Tensor) -> None:
        self.held = values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(ShardedWeight, lambda weight: weight.held, (args, kwargs or {}))
        results = func(*args, **kwargs)
        return tree_map_only(Tensor, cls, results) if func in _KEEPING else results

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], _context: None, _size: Any, _stride: Any) -> Self:
        return cls(parts["held"])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain values, so that a checkpoint can be read without Octet."""
        return self.held.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedWeight({self.held!r})"

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, _outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor, Tensor]]:
        """Return this rank's codes as bytes, padded as FSDP2 pads, and the scale and amax, each fp32 ().

        torch calls this hook before each gather, on all ranks together. mesh: the ranks that hold
        shards. outer_size: the size of the whole weight. module: the layer.
        """
        assert isinstance(module, Float8Linear)
        _check(module, self.shape, outer_size)
        if not module.gathers_codes:  # the first gather; a model that is not sharded quantizes its values
            module.gathers_codes = True
        scaling, values = module.weight_scaling, self.held
        if mp_policy.param_dtype is not None:
            values = values.to(mp_policy.param_dtype)  # what a gather of values would send
        num_rows = -(-outer_size[0] // mesh.size())
        if len(values) < num_rows:
            values = torch.cat((values, values.new_zeros(num_rows - len(values), *values.shape[1:])))
        amax = kernels.compute_amax(values).nan_to_num_(nan=torch.inf, posinf=torch.inf)  # of NaN, ranks see different maxima
        if mesh.size() > 1:
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
        rows, _ = scaling.quantize(values, amax=amax, columns=False)
        assert rows is not None
        return (rows.codes.view(torch.uint8),), (rows.dequant_scale, amax)

    def fsdp_post_all_gather(
        self,
        gathered: Sequence[Tensor],
        numbers: tuple[Tensor, Tensor],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple["GatheredWeight", tuple[Tensor]] | None:
        """Return the gathered weight and the tensor that FSDP2 frees with it. With `out`, only set its scale and amax.

        torch calls this hook after each gather. out: the weight of an earlier gather, into which
        FSDP2 has gathered again.
        """
        if out is None:
            weight = GatheredWeight(gathered[0].view(torch.float8_e4m3fn), *numbers, param_dtype)
            return weight, (gathered[0],)
        if not isinstance(out, GatheredWeight):
            raise ValueError(
                f"FSDP2 wants codes in a {type(out).__name__}; allowed: a parameter that fully_shard alone has cut. Leave out "
                "fsdp_float8_all_gather, or the other parallelism."
            )
        out.dequant_scale, out.whole_amax = numbers
        return None


class GatheredWeight(Tensor):
    """A whole weight, (N, K), that exists only as FP8 codes. For autograd it has the dtype of the values."""

    codes: Tensor
    dequant_scale: Tensor
    whole_amax: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, _dequant_scale: Tensor, _amax: Tensor, dtype: torch.dtype) -> "GatheredWeight":
        return _wrapper(cls, codes, dtype)

    def __init__(self, codes: Tensor, dequant_scale: Tensor, amax: Tensor, _dtype: torch.dtype) -> None:
        """dequant_scale, amax: fp32 (), of the whole weight."""
        self.codes, self.dequant_scale, self.whole_amax = codes, dequant_scale, amax

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = next((argument for argument in args if isinstance(argument, GatheredWeight)), None)
        if weight is not None and func in (
            _aten.detach.default,
            _aten.alias.default,
            _aten.as_strided.default,
            _aten.t.default,
        ):
            return cls(func(weight.codes, *args[1:]), weight.dequant_scale, weight.whole_amax, weight.dtype)
        if weight is not None and func is _aten.zeros_like.default:  # the gradient of a weight that was not used
            return torch.zeros_like(weight.codes, dtype=weight.dtype)
        raise ValueError(
            f"{func} would read the values of a weight that FSDP2 has gathered as FP8 codes; allowed: FP8 products. Leave out "
            "fsdp_float8_all_gather."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GatheredWeight({tuple(self.shape)}, dequant_scale={self.dequant_scale!r})"


def gather_in_fp8(model: nn.Module) -> None:
    """Let FSDP2 gather the weights of a model's FP8 layers as codes. Their parameters are replaced.

    Layers whose products are in bf16 keep their weights, which are gathered as they are stored. Nothing is sampled: samples
    are collected after an optimizer's step, and FSDP2's optimizer is not known here.
    """
    for layer in model.modules():
        if isinstance(layer, Float8Linear) and layer.fallback is Fallback.NONE:
            layer.weight = nn.Parameter(ShardedWeight(layer.weight.detach()), layer.weight.requires_grad)
            layer.statistics_every = 0
            layer.start_step(0)


def _wrapper(cls: Any, tensor: Tensor, dtype: torch.dtype) -> Any:
    """Return an instance of a tensor subclass with the sizes, strides and device of a tensor, in a dtype."""
    return make_wrapper_subclass(
        cls, tensor.shape, strides=tensor.stride(), storage_offset=tensor.storage_offset(), dtype=dtype, device=tensor.device
    )


def _check(layer: Float8Linear, shape: torch.Size, outer_size: torch.Size) -> None:
    """Raise ValueError for a shard that is not whole rows, and for a layer with products in bf16; on all ranks alike."""
    if shape[1:] != outer_size[1:]:
        raise ValueError(
            f"FSDP2 has cut a weight {tuple(outer_size)} to {tuple(shape)}; allowed with fsdp_float8_all_gather: a cut of the "
            "first dimension. Leave out shard_placement_fn, or fsdp_float8_all_gather."
        )
    if layer.high_precision:
        raise ValueError(
            "a layer would multiply in bf16 with a weight that FSDP2 gathers as FP8 codes; allowed: FP8 products. It was "
            f"{layer.fallback.name.lower()} in the run that its state came from: leave out fsdp_float8_all_gather."
        )
