"""Common ground of all packages. Imports nothing of ours."""
