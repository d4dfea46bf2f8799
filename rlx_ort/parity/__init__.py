"""Compares two models, or one model on two devices, and finds the first node at which they diverge."""
