"""The architecture: one mechanism per file, no cache, no requests, no process groups."""
