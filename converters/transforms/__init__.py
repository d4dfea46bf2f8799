"""Transforms: each turns a `ModelBundle` into another and reports its changes. One file a transform."""
