"""The report of one or more runs, as a self-contained HTML file. Torch-free."""
