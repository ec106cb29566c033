"""Losses from rewards and log-probabilities: pure functions on tensors, each with its formula and its source.

Tokens are flat, [T]: the *trained* completion tokens of one forward pass, trajectory after trajectory. Tokens outside
the loss mask are left out. ``row`` [T] is the trajectory of each token, as a row of the rank's batch; a trajectory is
never split. Three policies are involved (see ``losses``). Every result is a sum over tokens or trajectories, so that
passes and ranks add up to the batch.
"""
