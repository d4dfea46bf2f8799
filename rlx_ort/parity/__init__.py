"""How far two models, or one model on two devices, are apart, and which node is the first to differ.

To the right of `execution`: it opens sessions and runs them, and knows nothing of how a device is chosen.
"""
