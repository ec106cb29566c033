"""From rewards and log-probabilities to a loss: pure functions on tensors, each with its formula and its source."""
