"""Bytes on disk: extents, name map, verified loading and writing of the published layout."""
