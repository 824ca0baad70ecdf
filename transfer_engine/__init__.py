"""Moves bytes between registered memories of processes and machines."""
