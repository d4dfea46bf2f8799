"""The graphs, the measurements and the tables of scripts/regret_suite.py."""
