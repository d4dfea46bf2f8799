"""Keeps a runner answering when devices fail: failover, quarantine, re-admission, time limits and cancellation."""
