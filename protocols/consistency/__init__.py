"""The ledger: leases of groups, the groups of each train step, and recovery after failures.

Standard library only, synchronous, deterministic. Modules above this layer must not be imported here.
"""
