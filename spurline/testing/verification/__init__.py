"""`spurline verify`: train one model in many configurations, each compared with the single-process reference.

`cells` and `matrix` define the configurations, `run` runs them; `measure` and `reference` run on the ranks.
"""
