"""Step one parameter by plain torch: decode, update in fp32, round, encode, a run of elements at a time.

The walker sees how tensors are stored and no arithmetic; a rule (`rules/rule.py`) has the arithmetic. Only what is stored is
rounded: a step's update uses the states before they are rounded. It passes over each parameter once, in runs of elements, so
that no tensor is wide as a whole. The kernels' twin of it is `worker/kernels/cuda/optimizer.py`: the same numbers, bit for bit.
A rule that needs whole matrices has no kernels: its states are advanced by runs, and then it computes a direction.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from octet.worker.fp8.weight import stored
from octet.worker.optim.gradients import GradientReader, gradient_of
from octet.worker.optim.rules.rule import Group, MatrixRule
from octet.worker.optim.states import OptimizerStates
from octet.worker.optim.weights import RUN_LENGTH, runs

LONG_RUN_LENGTH = 1 << 24
"""Elements of a run on accelerators, where each op of a run is a launch: 64 MiB in fp32. On a CPU a run fits its cache."""


def update(optimizer: OptimizerStates, parameter: Tensor, group: Group) -> None:
    """Step a parameter by its gradient, which is finite. Allocates states that are missing."""
    rule = optimizer.rule.of(group)
    if isinstance(rule, MatrixRule):
        _update_matrix(optimizer, parameter, group, rule)
        return
    gradient = gradient_of(parameter)
    state = optimizer.state[parameter] or optimizer.allocate(parameter, group)
    state["step"] += 1
    gradients, weight = GradientReader(gradient), optimizer.stored_weight(parameter, group)
    held = {name: optimizer.stored_state(parameter, group, name) for name in rule.state_codecs}
    for elements in _runs(gradient):
        values, states = weight.read(elements), {name: state.read(elements) for name, state in held.items()}
        rule.step_(values, gradients.read(elements), states, int(state["step"]), group)
        weight.write(elements, values)
        for name, state_values in states.items():
            held[name].write(elements, state_values)
    weight.finish()


def _update_matrix(optimizer: OptimizerStates, parameter: Tensor, group: Group, rule: MatrixRule) -> None:
    """Step a parameter, or this rank's piece of one, by the direction of its whole matrix.

    Every rank of a divided matrix computes the direction of all of it and keeps its own elements (Liu et al. 2025,
    arXiv 2502.16982, algorithm 1): they have the bits of one process. A rank without elements only takes part in the gather.
    """
    num_held, origin = stored(parameter).numel(), optimizer.origins[parameter]
    elements_of_matrix = torch.empty(num_held, dtype=rule.matrix_dtype(parameter.device), device=parameter.device)
    if num_held:
        _advance_matrix(optimizer, parameter, group, rule, elements_of_matrix)
    if optimizer.matrices is not None:
        elements_of_matrix = optimizer.matrices.join(parameter, elements_of_matrix)
    if not num_held:
        return
    direction = rule.direction_of(elements_of_matrix.view(origin.matrix_shape)).reshape(-1)
    direction = direction[origin.first_element : origin.first_element + num_held]
    weight = optimizer.stored_weight(parameter, group)
    for elements in _runs(direction):
        values = weight.read(elements)
        rule.move_(values, direction[elements.start : elements.stop].float(), origin.matrix_shape, group)
        weight.write(elements, values)
    weight.finish()


def _advance_matrix(
    optimizer: OptimizerStates, parameter: Tensor, group: Group, rule: MatrixRule, elements_of_matrix: Tensor
) -> None:
    """Advance a parameter's states by its gradient, and write the elements of the matrix whose direction is wanted."""
    gradients = GradientReader(gradient_of(parameter))
    state = optimizer.state[parameter] or optimizer.allocate(parameter, group)
    state["step"] += 1
    held = {name: optimizer.stored_state(parameter, group, name) for name in rule.state_codecs}
    for elements in _runs(elements_of_matrix):
        gradient = gradients.read(elements)
        states = {name: part.read(elements) for name, part in held.items()}
        wanted, _ = rule.advance_(states, -gradient if group["maximize"] else gradient, int(state["step"]), group)
        elements_of_matrix[elements.start : elements.stop] = wanted
        for name, values in states.items():
            held[name].write(elements, values)


def _runs(elements: Tensor) -> Iterator[range]:
    return runs(elements.numel(), RUN_LENGTH if elements.device.type == "cpu" else LONG_RUN_LENGTH)
