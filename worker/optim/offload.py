"""Keep an optimizer's states in host memory (`host_states.py` moves them)."""

import torch

from octet.worker.optim.host_states import HostStates
from octet.worker.optim.optimizer import LowBitOptimizer


def offload_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Keep the states of `optimizer` in host memory from now on, apart from master weights. Each step reads and writes them.

    Call it after `initialize`, with the model on the device where it trains. `memory_report` counts that device alone.
    Raises ValueError for an optimizer that is not from `initialize`, or that holds pieces of parameters (ZeRO).
    """
    if not isinstance(optimizer, LowBitOptimizer) or optimizer.pieces:
        what = "that holds pieces of parameters (ZeRO)" if isinstance(optimizer, LowBitOptimizer) else "not from initialize"
        raise ValueError(
            f"got a {type(optimizer).__name__} {what}; allowed: AdamW, Adam, Lion and SGD after initialize, with whole "
            "parameters. Call initialize first, and leave out ZeRO or offload_optimizer."
        )
    if optimizer.host_states is None:
        optimizer.host_states = HostStates(optimizer.rule.state_codecs)
        for state in optimizer.state.values():
            if state:
                optimizer.host_states.hold(state)
