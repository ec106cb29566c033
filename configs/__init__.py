"""The configuration of a run: the schema, the loader and the runnable presets."""

if not __name__.startswith("staleflow."):
    raise ImportError("import this package as staleflow.configs, not as configs")
