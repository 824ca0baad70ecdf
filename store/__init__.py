"""Mooncake Store: a pool of KVCache blocks in the memory and disks of many nodes."""
