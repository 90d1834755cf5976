"""What Octet's kernels, training steps and curves are on one GPU, beside the alternatives measured in the same run.

`docs/benchmarks.md` says how to run them and what each figure means.
"""
