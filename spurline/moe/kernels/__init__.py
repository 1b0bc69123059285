"""Kernels for grouped matmuls, one file each, and `choose.py`, which selects one."""
