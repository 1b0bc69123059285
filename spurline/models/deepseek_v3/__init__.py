"""DeepSeek-V3: multi-head latent attention, dense first layers, then MoE layers with shared experts."""
