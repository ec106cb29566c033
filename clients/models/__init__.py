"""Model files and computations that the trainer and the model stages share."""
