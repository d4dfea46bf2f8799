"""Every op as small graphs, and running them on a device against a reference."""
