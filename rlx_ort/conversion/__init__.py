"""Convert a model between files: read it, transform it, write it, and check the result."""
