"""Shows a run to a person: what it does, how stale its data is, and why anything waits."""
