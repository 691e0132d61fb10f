"""The time of a training step, without torch and without running anything."""
