"""The 10B-A2B mixture of experts: DeepSeek's architecture with fewer experts of the same size."""
