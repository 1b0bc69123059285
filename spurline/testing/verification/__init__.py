"""What `spurline verify` does: one model trained in many ways, each compared with the reference on one process.

`cells` and `matrix` say which ways, `run` goes through them; `measure` and `reference` are what the ranks do.
"""
