"""Memory of running sequences: owners in `slots` and `pages`, bytes in `arenas` and `state`."""
