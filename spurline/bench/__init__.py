"""Benchmarks of speed and memory: interleaved candidates, ratios to a floor and to peer libraries."""
