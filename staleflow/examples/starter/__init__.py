"""What ``staleflow init`` writes, a task to begin from: copied as it is, but for the name of the run."""
