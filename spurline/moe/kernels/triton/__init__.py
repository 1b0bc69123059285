"""SwiGLU experts in Triton: `products` (the kernels), `tiles` (their sizes), `launch`, `experts` (the ops)."""
