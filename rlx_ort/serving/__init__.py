"""Serving: the Open Inference Protocol over REST and gRPC, with batches and devices chosen by predicted times."""
