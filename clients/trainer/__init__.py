"""The trainer process: consume sealed batches, train, publish the next version."""
