"""Monitor of a run: activity, staleness, and the reason of each wait."""
