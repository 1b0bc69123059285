"""Start the ranks of a run: on this machine, and as a job of a cluster."""
