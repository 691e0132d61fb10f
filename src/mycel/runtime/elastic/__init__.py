"""Groups whose members change: survivors of a failure, and ranks that come (back), form the next group."""
