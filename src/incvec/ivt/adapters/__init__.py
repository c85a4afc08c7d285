"""Thin adapters to other people's loops. Each one imports its host, so none is imported here."""
