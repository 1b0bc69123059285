"""The page about a run, or several: one HTML file that needs nothing else. Free of torch."""
