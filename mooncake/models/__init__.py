"""Models to try the platform with: a tiny random one, and a small real one."""
