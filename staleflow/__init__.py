"""Reinforcement learning post-training that never learns from data older than the bound you asked for."""

__version__ = "0.1.0"
