"""Reports of measured runs: figures and one self-contained page."""
