"""Low-rank adapters (LoRA): W + alpha / rank * B A, with W frozen."""
