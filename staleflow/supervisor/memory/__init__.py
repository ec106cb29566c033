"""The memory plan: what each process of a run needs, before the run starts."""
