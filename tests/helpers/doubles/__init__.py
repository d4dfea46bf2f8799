"""Stand-ins for hardware: providers that misbehave, and a recorder without a GPU."""
