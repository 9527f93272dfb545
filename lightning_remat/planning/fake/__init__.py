"""A trace without a device: one training step on fake tensors, and what real kernels would have done."""
