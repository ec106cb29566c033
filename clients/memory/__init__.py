"""Measure the memory of a run's passes without weights, for a plan before the run starts."""
