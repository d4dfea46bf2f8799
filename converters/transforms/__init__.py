"""Transforms: each turns a `ModelBundle` into another and says in a report what it did. One file a transform."""
