"""Metadata of the pool: which object lies where, who reads or writes it, and what is evicted."""
