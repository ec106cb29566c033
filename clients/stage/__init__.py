"""Stage workers: what happens to a group between its push and its training. The first stage is the reward."""
