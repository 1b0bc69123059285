"""The 10B-A2B mixture of experts: DeepSeek's architecture with fewer and as large experts."""
