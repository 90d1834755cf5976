"""A training step on fake tensors: the memory that a job takes, without a device and without arithmetic."""
