"""Small Python functions of whole numbers, and of numbers in memory, as machine code."""
