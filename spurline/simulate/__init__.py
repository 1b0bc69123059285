"""One real training step as rank 0 of many ranks that aren't there, on a device that isn't there: what it costs."""
