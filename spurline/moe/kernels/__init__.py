"""How grouped products are computed: one file a kernel, and `choose.py`, which decides."""
