"""Keeping a registry for years: verify, gc, archives, search, lineage."""
