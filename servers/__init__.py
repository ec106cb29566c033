"""Who holds state: the scheduler, the trajectory server and the parameter server."""

if not __name__.startswith("staleflow."):
    raise ImportError("import this package as staleflow.servers, not as servers")
