"""A sink process: results collected, committed to the store, and only then acknowledged."""
