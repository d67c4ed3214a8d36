"""Slurm jobs: on a real Slurm of two nodes, and on a stub for what that can't show."""
