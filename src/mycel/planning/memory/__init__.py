"""What ranks hold in a step, by part, and whether it fits."""

from mycel.planning.memory.footprint import Footprint, footprints, memory_of, ways_to_save
from mycel.planning.memory.parts import MemoryParts, activation_bytes, again_bytes, memory_parts

__all__ = [
    "Footprint",
    "MemoryParts",
    "activation_bytes",
    "again_bytes",
    "footprints",
    "memory_of",
    "memory_parts",
    "ways_to_save",
]
