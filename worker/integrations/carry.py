"""Keep what a plain checkpoint of a model loses in the state dict of its optimizer.

Loops of others save a model by `save_pretrained`, which writes values, and an optimizer by its state dict. Codes, scales,
histories and counters would be lost, and with them a resume that is equal bit for bit. They travel with the optimizer here:
the loop loads values first, then the optimizer's states bring the rest. A checkpoint of any level can be loaded. A loop that
has not saved the model, as Accelerate's where it got the optimizer alone, would go on from other values: hashes of what is not
carried tell.
"""

from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.checkpoint.resume import load_model, make_masters
from octet.worker.fp8.fsdp import is_shard
from octet.worker.fp8.loss_scaling import STATE_BUFFER
from octet.worker.fp8.stored import CODES, exact_state_dict, take_weight
from octet.worker.prepare.export_state_dict import as_plain

MODEL_STATE = "octet_model_state"
MODEL_HASHES = "octet_model_hashes"
"""Keys in an optimizer's state dict: what is carried, and hashes of what the loop saves itself, with dtypes, by name."""
_HASHED_ELEMENTS = 1 << 22
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, as int64: a multiplier of hashes."""


class _Carrier:
    """A model and its optimizer, which stands for both in `state_dict` and `load_state_dict`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict with the tensors of the model that are no values of a plain model."""
        held = exact_state_dict(self.model)
        plain = as_plain(self.model, held)
        own = {name: tensor for name, tensor in held.items() if plain.get(name) is not tensor}
        hashes = {name: _hash(tensor) for name, tensor in held.items() if name not in own and not is_shard(tensor)}
        return type(self.optimizer).state_dict(self.optimizer) | {MODEL_STATE: own, MODEL_HASHES: hashes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load both. Of a state dict that carries no model, as torch's optimizers make it, the optimizer's states alone.

        Raises ValueError where `initialize`'s optimizer was saved without its model: codes would not fit their states. Also
        where the model has other values than it had when the optimizer was saved.
        """
        states = dict(state_dict)
        saved, hashes = states.pop(MODEL_STATE, None), states.pop(MODEL_HASHES, {})
        _check_values(exact_state_dict(self.model), hashes)
        has_same_storage = True
        if saved is not None:
            has_same_storage = load_model(self.model, self.optimizer, self._completed(saved), states)
        elif "num_skipped_steps" in states:
            raise ValueError(
                f"the checkpoint's optimizer is one of octet.initialize and has no {MODEL_STATE}; allowed: checkpoints of a "
                "run that called octet.prepare_trainer or octet.carry_model_state, or of one without Octet. Start from the "
                "checkpoint's weights by from_pretrained."
            )
        type(self.optimizer).load_state_dict(self.optimizer, states)
        if not has_same_storage:
            make_masters(self.optimizer)

    def _completed(self, saved: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the carried state, with the values that the model has loaded from elsewhere."""
        state = exact_state_dict(self.model)
        state.pop(STATE_BUFFER, None)
        for name in saved:
            if name.rpartition(".")[2] == CODES:
                take_weight(state, name.removesuffix(CODES))
        return state | saved


def _hash(tensor: Tensor) -> list[Any]:
    """Return a hash of a tensor's values, int64 () on its device, and the name of its dtype. Their order is left out."""
    values = tensor.detach()
    hashed = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in values.reshape(-1).split(_HASHED_ELEMENTS):
        bits = part.double().view(torch.int64)
        hashed = hashed + (bits * _ODD + (bits >> 32)).sum()
    return [hashed, str(tensor.dtype)]


def _check_values(held: dict[str, Tensor], hashes: dict[str, list[Any]]) -> None:
    """Raise ValueError for tensors that the loop saves and that are not what they were."""
    compared = [name for name, (_, dtype) in hashes.items() if name in held and str(held[name].dtype) == dtype]
    other = [name for name in compared if int(_hash(held[name])[0]) != int(hashes[name][0])]
    if other:
        raise ValueError(
            f"the optimizer's state was saved with other values of {other[0]!r} and {len(other) - 1} more of {len(compared)} "
            "tensors than the model has now; allowed: the model's values of the same checkpoint, loaded before the optimizer. "
            "Accelerate saves the models that it was given alone: call accelerator.prepare_model(model, evaluation_mode=True) "
            "before octet.initialize, or accelerator.prepare(model, optimizer)."
        )


def carry_model_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Save in the optimizer's state dict what the values of the model's weights leave out, and bring it back.

    For loops that save a model by `save_pretrained`, after `initialize`; a loop that saves `model.state_dict()` needs it not.
    Calling it a second time changes nothing.
    """
    carrier = _Carrier(model, optimizer)
    optimizer.state_dict = carrier.state_dict  # type: ignore[method-assign]
    optimizer.load_state_dict = carrier.load_state_dict  # type: ignore[method-assign]
