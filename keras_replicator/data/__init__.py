"""Rows to replicas: sources, splitting, position."""
