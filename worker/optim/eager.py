"""Lets torch's optimizers be used without loading torch's compiler, which takes a rank as long as the rest of its start.

torch wraps four methods of `torch.optim.Optimizer` with `torch._disable_dynamo`, so that a compiler leaves them alone. The
wrapper loads `torch._dynamo` at the first call, sympy and FSDP with it, and keeps what it gets as an attribute of the method.
"""

import torch


def leave_the_compiler_unloaded() -> None:
    """Let the four methods run as they are in this process. For a rank: it compiles parts of a model, never an optimizer.

    If a version of torch keeps the attribute under another name, this has no effect, and the compiler is loaded as before.
    """
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None and not hasattr(method, "__dynamo_disable"):
            setattr(method, "__dynamo_disable", method)  # no name mangling, and mypy knows no such attribute
