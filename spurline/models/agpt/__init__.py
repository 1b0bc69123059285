"""AGPT: a dense decoder in the style of Llama."""
