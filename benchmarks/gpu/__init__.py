"""Benchmarks of Octet's kernels, training steps and losses on one GPU; alternatives are measured in the same run.

`docs/benchmarks.md` says how to run them and what each figure means.
"""
