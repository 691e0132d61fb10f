"""Runs torch's own distributed tests over mycel, and compares them with Gloo's results (see ``__main__``)."""
