"""Who does what next: pure functions of a snapshot. No clock, no randomness, no IO; the ledger has the last word."""
