"""Hugging Face folders in and out: safetensors files, and run folders made of them or turned into them."""
