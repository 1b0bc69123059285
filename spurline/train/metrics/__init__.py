"""Metrics of a run.

step_metrics.py     what a step measured, on the device until it is read
timing.py           where the time of a step goes; throughput.py: tokens per second
logger.py           reads a step that is to be logged, completes its record and passes it on
training_health.py  warnings from the records
writers.py          where records go: jsonl.py, tensorboard.py, wandb.py
"""
