"""Environments to start from, as user code: each file stands alone, ``environment.run`` names its class."""
