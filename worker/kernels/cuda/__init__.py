"""The kernels of CUDA devices, in Triton: each equals its twin in `worker/kernels/reference.py` bit for bit.

Loaded by `dispatch.py` for a tensor on such a device, and by the tests, which run it under Triton's interpreter on a CPU.
"""
