"""Transport `rdma`: reliable connected queue pairs over every NIC, by pyverbs (paper 3.2.2)."""
