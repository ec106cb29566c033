"""The quickstart's own task and model: arithmetic with a checkable answer, a transformer small enough for two cores."""
