"""Deterministic fault simulation: the shipped servers and clients on simulated time, network and disks."""
