"""Where to run: which devices are allowed, which work here, which take a graph, and which is fastest.

Everything here decides from claims, profiles and the policy. No session of the user's graph is opened.
"""
