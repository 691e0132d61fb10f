"""Slow, plain forms of what the library does on arrays and compiled: what the fast forms are compared with."""
