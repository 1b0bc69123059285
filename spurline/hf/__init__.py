"""Import and export of Hugging Face model folders."""
