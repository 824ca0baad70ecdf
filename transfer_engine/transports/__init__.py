"""Ways to move bytes; each module is one (base.py: what a way must offer)."""
