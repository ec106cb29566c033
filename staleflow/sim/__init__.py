"""The shipped scheduler, its machine and its strategies on a virtual clock, among simulated engines and a trainer."""
