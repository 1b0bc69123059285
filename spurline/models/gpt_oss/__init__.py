"""gpt-oss: attention sinks, alternating sliding windows, biases, and experts with a clamped activation."""
