"""Adapters to the training loops of other libraries. Each imports its host library, so none is imported here."""
