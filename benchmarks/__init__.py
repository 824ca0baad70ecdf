"""Side-by-side measurements; each is a command that prints a table or, with --json, one JSON object."""
