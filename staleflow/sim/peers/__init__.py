"""What other systems would do with the same engines, trajectories and trainer: their rules, in the simulator only."""
