"""A long run of random collectives with checksums (see ``__main__``)."""
