"""What every wing needs of ranks: groups of them, nodes of a mesh, exchanges with gradients and in the background.

Nothing here knows what travels or why: a thing that a second wing needs comes down to this floor.
"""
