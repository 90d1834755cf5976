"""Step one parameter by plain torch: decode, update in fp32, round, encode, a run of elements at a time.

The walker sees how tensors are stored and no arithmetic; a rule (`rules/rule.py`) has the arithmetic. Only what is stored is
rounded: a step's update uses the states before they are rounded. It passes over each parameter once, in runs of elements, so
that no tensor is wide as a whole. The kernels' twin of it is `worker/kernels/cuda/optimizer.py`: the same numbers, bit for bit.
"""

from torch import Tensor

from octet.worker.optim.gradients import GradientReader, gradient_of
from octet.worker.optim.rules.rule import Group
from octet.worker.optim.states import OptimizerStates
from octet.worker.optim.weights import runs


def update(optimizer: OptimizerStates, parameter: Tensor, group: Group) -> None:
    """Step a parameter by its gradient, which is finite. Allocates states that are missing."""
    gradient = gradient_of(parameter)
    state = optimizer.state[parameter] or optimizer.allocate(parameter, group)
    state["step"] += 1
    gradients, weight = GradientReader(gradient), optimizer.stored_weight(parameter, group)
    stored = {name: optimizer.stored_state(parameter, group, name) for name in optimizer.rule.state_codecs}
    for elements in runs(gradient.numel()):
        values, states = weight.read(elements), {name: state.read(elements) for name, state in stored.items()}
        optimizer.rule.step_(values, gradients.read(elements), states, int(state["step"]), group)
        weight.write(elements, values)
        for name, state_values in states.items():
            stored[name].write(elements, state_values)
    weight.finish()
