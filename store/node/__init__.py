"""One node of the pool: a registered segment of memory and the truth about what it holds."""
