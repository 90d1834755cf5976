"""Start a converted model from random values without any process ever holding it: `draw_model`, then `parallelize`.

The model is built on the device `meta`, converted and divided there. Then each rank draws one whole parameter after another, as
the model's own classes draw it, and keeps its share. A family of ours draws what a job draws of the same seed. Of any other
model each parameter has random numbers of its own, from the seed and its name: they are the same on any number of ranks.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from octet.worker.common.deferred import defer_parameters, move_buffers
from octet.worker.data.order import seed_of
from octet.worker.fp8.attention import unstack_attention
from octet.worker.fp8.experts import unstack_experts
from octet.worker.fp8.stacks import Stack, stacks_of
from octet.worker.models import TrainedModel
from octet.worker.models.initial import parameters_on_meta
from octet.worker.parallel.materialize import Unfilled, unfilled_parameters
from octet.worker.prepare.initialize import prepare
from octet.worker.prepare.options import read_options
from octet.worker.pretrained.load import check_engine, leave_to_parallelize
from octet.worker.pretrained.values import DrawnValues


def draw_model(
    build: Callable[[], nn.Module],
    opt_level: str = "O2",
    *,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    device: str | torch.device = "cpu",
    seed: int = 0,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model at a level and its optimizer, as `initialize` does, without values.

    `octet.parallelize`, which has to follow, divides the model; then each rank draws its share, one parameter at a time.

    build: makes the model in fp32 on no device of its own, as `lambda: LlamaForCausalLM(config)`. make_optimizer: given the
    model, makes an optimizer that has not stepped. seed: of the values, and of stochastic rounding. The rest: as for
    `initialize`.
    Values are drawn by the classes of transformers (`_init_weights`), or by `reset_parameters`, as torch's layers have it; a
    parameter that neither of them writes is refused when it is drawn. Matrices of one parameter, as experts and torch's own
    attention have them, are drawn together. Raises ValueError for what `initialize` refuses, without an optimizer of ours, and
    at level ao.
    """
    with parameters_on_meta():
        model = build()
    tokens = options.pop("tokens", None)
    precision = read_options(opt_level, options)
    check_engine("draw_model is called", precision)
    values: DrawnValues | _ValuesByClass
    if isinstance(model, TrainedModel) and _draws_by_parameter(model):
        values = DrawnValues(model, seed, torch.device(device))
    else:
        plain = deepcopy(model)
        unstack_experts(model, precision)
        unstack_attention(model, precision, without_values=True)
        values = _ValuesByClass(model, plain, seed, torch.device(device))
    prepared = prepare(model, make_optimizer(model), precision, seed=seed, tokens=tokens, source=values)
    leave_to_parallelize("draw_model is called", prepared, values)
    assert prepared.optimizer is not None
    return prepared.model, prepared.optimizer


def _draws_by_parameter(model: TrainedModel) -> bool:
    return all(model.initial(name, parameter.dim()) is not None for name, parameter in model.named_parameters())


class _ValuesByClass:
    """Draws each parameter as the classes of the model do. It is also the model's `WeightSource` in `prepare`."""

    def __init__(self, model: nn.Module, plain: nn.Module, seed: int, device: torch.device) -> None:
        """model: on `meta`; its parameters are on the device afterwards, without memory. plain: the same, never converted."""
        self.device, self.unfilled = device, unfilled_parameters(model)
        self._plain, self._seed = plain, seed
        self._stacks = {part: stack for stack in stacks_of(model) for part in stack.parts}
        self._drawn: tuple[Stack, Tensor] | None = None
        for name in (parameter.names[0] for parameter in self.unfilled):
            owner, *around = self._chain(self._stacks[name].name if name in self._stacks else name)
            if _initializer(owner, [owner, *around]) is None:
                raise ValueError(
                    f"draw_model cannot draw {name} of {type(owner).__name__}; allowed: modules with "
                    f"reset_parameters(), and models of transformers. Give {type(owner).__name__} this method."
                )
        defer_parameters(model, device)

    def read(self, parameter: Unfilled) -> Tensor:
        """Return a parameter's whole values, fp32."""
        stack = self._stacks.get(parameter.names[0])
        if stack is None:
            return self._draw(parameter.names[0]).to(self.device)
        if self._drawn is None or self._drawn[0] is not stack:
            self._drawn = stack, self._draw(stack.name)
        values = stack.split(self._drawn[1])[stack.parts.index(parameter.names[0])].to(self.device, copy=True)
        if parameter.names[0] == stack.parts[-1]:
            self._drawn = None
        return values

    def _draw(self, name: str) -> Tensor:
        """Return the values of a parameter of the plain model, on the CPU."""
        chain, attribute = self._chain(name), name.rpartition(".")[2]
        on_meta = chain[0]._parameters[attribute]
        assert on_meta is not None
        drawn = nn.Parameter(torch.full(on_meta.shape, torch.nan), requires_grad=on_meta.requires_grad)
        chain[0]._parameters[attribute] = drawn
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed_of("initial values", self._seed, name))
                for initialize in self._initializers(chain):  # those of the modules around it may draw it again
                    initialize()
        finally:
            chain[0]._parameters[attribute] = on_meta
        if drawn.isnan().any():
            raise ValueError(
                f"{type(chain[0]).__name__} does not draw {name} in reset_parameters() or _init_weights(); allowed: models "
                "whose parameters all are drawn there. Write it there, or build the model whole."
            )
        return drawn.detach()

    def scale_of(self, parameter: Unfilled) -> Tensor | None:
        """Return None: drawn values are no codes."""
        return None

    def skip(self, parameter: Unfilled) -> None:
        """Draw nothing: each parameter has random numbers of its own."""

    def fill(self, layer: nn.Module) -> None:
        """Leave the layer without values."""

    def dequant_scale(self, weight: Tensor) -> Tensor | None:
        """Return None: drawn values are no codes."""
        return None

    def finish(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Move the buffers, which have values, to the device."""
        move_buffers(model, self.device)

    def _chain(self, name: str) -> list[nn.Module]:
        """Return the module of the plain model that owns a parameter, and those around it up to the model."""
        *path, _ = name.split(".")
        chain = [self._plain]
        for name in path:
            chain.append(chain[-1].get_submodule(name))
        return chain[::-1]

    @staticmethod
    def _initializers(chain: list[nn.Module]) -> Iterator[Callable[[], Any]]:
        for number, module in enumerate(chain):
            if (initialize := _initializer(module, chain[number:])) is not None:
                yield initialize


def _initializer(module: nn.Module, chain: list[nn.Module]) -> Callable[[], Any] | None:
    """Return what draws a module's values: of the nearest model of transformers around it, or of the module itself."""
    for around in chain:
        if callable(of_transformers := getattr(around, "_init_weights", None)):
            return lambda: of_transformers(module)
    names = ("reset_parameters", "_reset_parameters")  # the second of torch's own attention
    return next((own for own in (getattr(module, name, None) for name in names) if callable(own)), None)
