"""Stages to start from, as user code: each file stands alone, ``run`` of a ``[[stage]]`` names its function."""
