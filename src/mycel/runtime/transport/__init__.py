"""Moves bytes between two ranks over one chosen path: sockets, and how ranks find each other's."""
