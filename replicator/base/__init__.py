"""Foundation of all other folders: types, trees, the mesh, declared leaves."""
