"""How a graph is compiled: values without behaviour, which every floor above the IR may read."""
