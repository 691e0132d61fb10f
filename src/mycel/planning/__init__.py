"""Which rank holds what, decided without torch: by a scheduler, a laptop or the running job alike."""
