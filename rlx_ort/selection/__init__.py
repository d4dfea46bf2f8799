"""Where to run: policy, support, cost and the choice. Opens no user session."""
