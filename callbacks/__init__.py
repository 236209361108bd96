"""Callbacks of keras_replicator."""
