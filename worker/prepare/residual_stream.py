"""The residual stream of a model in bf16: half the bytes of each sum that blocks keep, and send from stage to stage.

Embeddings return fp32, so the stream stays fp32 unless it is cast. Here the first block casts it. All sums in and between
blocks are then rounded to bf16, and so are their gradients, as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053). Norms
read and return bf16; their weights and statistics stay fp32, and they keep their input in its dtype (`fp8/norm_forward.py`).
On a CPU the model computes in bf16 under autocast too, with the dtypes that it has on an accelerator.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.common.errors import InvalidConfig
from octet.worker.common.wrap import wrapper_of
from octet.worker.fp8.accelerator import AutocastForward
from octet.worker.fp8.norm_forward import return_dtype_of_input
from octet.worker.models.blocks import repeated_blocks

_CHANGE = "Leave out residual_stream."


def keep_residual_in_bf16(model: nn.Module) -> int:
    """Let the repeated blocks of a model pass on their hidden states in bf16. Returns the number of blocks.

    Call it after `initialize` and before other functions that change blocks. A block takes the hidden state as its first
    argument, or as `hidden_states`, of any floating dtype, and returns it alone or as the first of a tuple. The first call
    raises InvalidConfig for blocks that do otherwise. Raises ValueError for a model without such blocks, for one that has
    no layers in bf16 or FP8, and for one whose stream is in bf16 already.
    """
    autocast = wrapper_of(model, AutocastForward)
    if autocast is None or autocast.dtype != torch.bfloat16:
        found = "none" if autocast is None else "layers in fp16"
        raise ValueError(
            f"a residual stream in bf16 needs layers that return bf16, and found {found}; allowed: models initialized at "
            f"bf16-amp or a level that multiplies in FP8. Choose another level, or leave out residual_stream."
        )
    if getattr(model, "residual_dtype", torch.float32) == torch.bfloat16:
        raise ValueError(f"the residual stream of this model is in bf16 already; allowed: one call. {_CHANGE}")
    blocks = repeated_blocks(model)
    if not blocks:
        raise ValueError(
            "the model repeats no blocks, and the residual stream is what they pass on; allowed: models with an nn.ModuleList "
            f"or nn.Sequential of alike blocks. {_CHANGE}"
        )
    for module in model.modules():
        if (forward := wrapper_of(module, AutocastForward)) is not None:
            forward.is_on_cpu_too = True
    return_dtype_of_input(model, blocks)
    for block in blocks:
        block.register_forward_pre_hook(_enter, with_kwargs=True)
        block.register_forward_hook(_check)
    model.residual_dtype = torch.bfloat16  # type: ignore[assignment]  # read by a pipeline, which sends it
    return len(blocks)


def _enter(block: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A hook that casts the hidden state that a block is given."""
    hidden = arguments[0] if arguments else options.get("hidden_states")
    if not isinstance(hidden, Tensor) or not hidden.is_floating_point():
        raise InvalidConfig(
            f"training.residual_stream: {type(block).__name__} got a {type(hidden).__name__} where bf16 needs the hidden "
            f"state; allowed: blocks whose first argument, or hidden_states, it is. {_CHANGE}"
        )
    hidden = hidden.to(torch.bfloat16)
    return ((hidden, *arguments[1:]), options) if arguments else (arguments, options | {"hidden_states": hidden})


def _check(block: nn.Module, _arguments: tuple[Any, ...], output: Any) -> None:
    """A hook that refuses a block that makes something else of the stream, which would then take more memory, not less."""
    hidden = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(hidden, Tensor) or hidden.dtype != torch.bfloat16:
        found = hidden.dtype if isinstance(hidden, Tensor) else type(hidden).__name__
        raise InvalidConfig(
            f"training.residual_stream: {type(block).__name__} was given bf16 and returns {found}; allowed with bf16: blocks "
            f"that add what their layers return. {_CHANGE}"
        )
