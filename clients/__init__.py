"""Who does the work: rollout, stage and trainer clients, with their engines and backends."""

if not __name__.startswith("staleflow."):
    raise ImportError("import this package as staleflow.clients, not as clients")
