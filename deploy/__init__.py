"""Ways to run the whole: one machine, a simulation, containers."""
