"""Triton kernels, one file a family; imported on first use only."""
