"""Start the ranks of a run: on this machine, or as a job on a cluster."""
