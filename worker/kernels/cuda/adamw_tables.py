"""The tables through which one launch takes any number of parameters: what their columns mean.

Parameters, int64: addresses and sizes. Groups, fp64: hyperparameters. Constants, fp32: what `prepare_kernel` makes of both
for each parameter and step.
"""

import triton.language as tl

# Parameters
WEIGHT = tl.constexpr(0)
REFINEMENT = tl.constexpr(1)  # the INT8 residual, or the codes of the master weight
WEIGHT_SCALE = tl.constexpr(2)
MASTER_SCALE = tl.constexpr(3)
AMAX = tl.constexpr(4)
EXP_AVG = tl.constexpr(5)  # and its scales and steps in the next two columns
EXP_AVG_SQ = tl.constexpr(8)  # and its scales in the next column
GRADIENT = tl.constexpr(11)
GRADIENT_SCALE = tl.constexpr(12)
STEP = tl.constexpr(13)
NUM_ELEMENTS = tl.constexpr(14)
FIRST_ELEMENT = tl.constexpr(15)  # of the whole parameter that a shard is part of
STREAM = tl.constexpr(16)  # of random numbers: the first of three
GROUP = tl.constexpr(17)
NUM_PARAMETER_COLUMNS = tl.constexpr(18)

# Groups
LR = tl.constexpr(0)
BETA1 = tl.constexpr(1)
BETA2 = tl.constexpr(2)
LOG_BETA1 = tl.constexpr(3)
LOG_BETA2 = tl.constexpr(4)
EPS = tl.constexpr(5)
DECOUPLED_DECAY = tl.constexpr(6)
L2_DECAY = tl.constexpr(7)
SIGN = tl.constexpr(8)  # -1 to maximize
NUM_GROUP_COLUMNS = tl.constexpr(9)

# Constants. "Scaled": in units of the weight's next scale, a power of two.
KEPT = tl.constexpr(0)  # what one unit of the codes becomes by decoupled decay, scaled
GRADIENT_DECAY = tl.constexpr(1)  # of one unit of the codes, by L2 decay
KEPT1 = tl.constexpr(2)  # beta1
ADDED1 = tl.constexpr(3)  # 1 - beta1
KEPT2 = tl.constexpr(4)
ADDED2 = tl.constexpr(5)
ROOT_CORRECTION = tl.constexpr(6)
EPSILON = tl.constexpr(7)
RATE = tl.constexpr(8)  # scaled
GRADIENT_UNIT = tl.constexpr(9)  # the sign, times the scale of the codes where there is one
NEW_SCALE = tl.constexpr(10)
ROUNDED_SCALE = tl.constexpr(11)  # of an E4M3 weight that has a master
NUM_CONSTANT_COLUMNS = tl.constexpr(12)
