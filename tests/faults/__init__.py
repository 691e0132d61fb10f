"""Every fault in every collective, on emulated clusters; ``python -m tests.faults``."""
