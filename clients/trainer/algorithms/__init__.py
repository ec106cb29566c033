"""From rewards and log-probabilities to a loss: pure functions on tensors, each with its formula and its source.

Tokens are flat, [T]: the *trained* completion tokens of one micro-batch, trajectory after trajectory; what the loss
mask takes out never comes here. ``row`` [T] says which trajectory, as a row of the rank's batch, and a trajectory is
never cut. Three policies meet (``losses``); everything is a sum over tokens or trajectories, so that micro-batches and
ranks add up to the batch.
"""
