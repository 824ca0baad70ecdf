"""A cluster in virtual time that drives the real Conductor core. Physics live here, policy never does."""
