"""Deterministic simulation of faults: the shipped servers and clients; time, network and disks are made up."""
