"""Agents compared before they are merged: what each changed, what they share, what a merge would make of it."""
