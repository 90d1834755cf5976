"""Levels, scaling, the FP8 linear layer, gradients in FP8, conversion by rule, and what is measured of them."""
