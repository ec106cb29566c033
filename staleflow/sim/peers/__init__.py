"""Rules of other systems, simulated with the same engines, trajectories and trainer."""
