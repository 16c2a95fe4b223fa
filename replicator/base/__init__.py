"""What all others stand on: types, trees, the mesh, declared leaves."""
