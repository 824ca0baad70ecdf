"""Memory that only a GPU can touch: the driver, pinned staging buffers, and the seam that the transports use."""
