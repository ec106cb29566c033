"""Runs on several machines: placement of processes, and launchers for ssh, Slurm, Kubernetes and Ray."""
