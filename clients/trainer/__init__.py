"""The process that learns: takes sealed batches, trains, publishes the next version."""
