"""What may happen: the consistency ledger, the coordination strategies and the wire."""

if not __name__.startswith("staleflow."):
    raise ImportError("import this package as staleflow.protocols, not as protocols")
