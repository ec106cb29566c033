"""The ledger: who may produce which group, which groups a step trains, and what happens when somebody fails.

Standard library only, synchronous, deterministic. Nothing above this floor may be imported here.
"""
