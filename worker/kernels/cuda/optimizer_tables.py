"""The columns of the tables through which one launch steps any number of parameters.

Parameters, int64: addresses and sizes. Groups, fp64: hyperparameters. Constants, fp32: what `prepare_kernel` computes from
both for each parameter and step. The columns from `RULE` on belong to the rule (`optimizer_rules.py`).
"""

import triton.language as tl

# Parameters
WEIGHT = tl.constexpr(0)
REFINEMENT = tl.constexpr(1)  # the INT8 residual, or the codes of the master weight
WEIGHT_SCALE = tl.constexpr(2)
MASTER_SCALE = tl.constexpr(3)
AMAX = tl.constexpr(4)
GRADIENT = tl.constexpr(5)
GRADIENT_SCALE = tl.constexpr(6)
STEP = tl.constexpr(7)
NUM_ELEMENTS = tl.constexpr(8)
FIRST_ELEMENT = tl.constexpr(9)  # of the whole parameter that a shard is part of
STREAM = tl.constexpr(10)  # of random numbers: the weight's; each state has the next one
GROUP = tl.constexpr(11)
STATES = tl.constexpr(12)  # the rule's states in their order, NUM_STATE_COLUMNS for each
NUM_STATE_COLUMNS = tl.constexpr(3)  # codes, dequant_scale, steps; 0 for a part that the codec does not store
MAX_STATES = 2
NUM_PARAMETER_COLUMNS = tl.constexpr(12 + 3 * MAX_STATES)

# Groups
LR = tl.constexpr(0)
DECOUPLED_DECAY = tl.constexpr(1)
L2_DECAY = tl.constexpr(2)
SIGN = tl.constexpr(3)  # -1 to maximize
GROUP_RULE = tl.constexpr(4)
MAX_RULE_HYPERPARAMETERS = 7
NUM_GROUP_COLUMNS = tl.constexpr(4 + MAX_RULE_HYPERPARAMETERS)

# Constants. "Scaled": in units of the weight's next scale, a power of two.
KEPT = tl.constexpr(0)  # what one unit of the codes becomes by decoupled decay, scaled
GRADIENT_DECAY = tl.constexpr(1)  # of one unit of the codes, by L2 decay
RATE = tl.constexpr(2)  # what the rule's direction is multiplied by, scaled
GRADIENT_UNIT = tl.constexpr(3)  # the sign, times the scale of the codes where there is one
NEW_SCALE = tl.constexpr(4)
ROUNDED_SCALE = tl.constexpr(5)  # of an E4M3 weight that has a master
CONSTANT_RULE = tl.constexpr(6)
NUM_CONSTANT_COLUMNS = tl.constexpr(13)
