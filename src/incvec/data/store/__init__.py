"""Packed stores: the images of a data set, decoded once and memory-mapped. `write` makes one, `open` reads it."""
