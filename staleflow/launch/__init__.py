"""Runs on more than one machine: who is where, and how engines that people already run start it there."""
