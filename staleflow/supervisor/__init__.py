"""Start, watch, restart and drain the processes of a run on one machine."""
