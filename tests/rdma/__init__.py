"""RDMA on any machine: soft-RoCE in a virtual machine, and a verbs provider in memory. README.md tells how."""
