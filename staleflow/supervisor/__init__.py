"""Starts, watches, restarts and drains the processes of a run on one machine."""
