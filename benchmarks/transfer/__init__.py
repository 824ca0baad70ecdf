"""The transfer engine beside its rivals, in one run: `python -m benchmarks.transfer` (see `__main__`)."""
