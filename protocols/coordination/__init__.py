"""Coordination strategies: pure functions from a snapshot to orders.

No clock, no randomness, no IO. The ledger checks every order and may refuse it.
"""
