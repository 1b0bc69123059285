"""OLMoE: many small experts, and queries and keys that are normalized over all heads."""
