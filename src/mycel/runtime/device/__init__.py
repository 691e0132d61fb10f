"""Collectives of tensors on devices: the same programs, in groups of point-to-point operations on a side stream."""
