"""Starter task that ``staleflow init`` copies unchanged, except for the name of the run."""
