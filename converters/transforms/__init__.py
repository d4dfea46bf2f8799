"""Transforms: each turns a `ModelBundle` into another and reports what it changed. One file a transform."""
