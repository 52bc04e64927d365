"""Checks of a few samples: captured a second time and compared, and computed on with the output head."""
