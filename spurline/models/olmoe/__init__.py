"""OLMoE: many small experts, and queries and keys normalized over all heads."""
