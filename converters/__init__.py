"""Placeholder, see the modules."""
