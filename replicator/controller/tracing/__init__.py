"""From a traced function to ops on slices: trace, place stray operations, fuse."""
