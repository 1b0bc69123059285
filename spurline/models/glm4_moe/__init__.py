"""GLM-4.5: half of a head rotates, biases of queries, keys and values, and experts as in DeepSeek-V3."""
