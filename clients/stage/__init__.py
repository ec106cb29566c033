"""Stage workers: process groups between their push and their training. The first stage is the reward."""
