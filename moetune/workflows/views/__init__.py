"""Sections of all that is shown: one function for each thing, for screens and pages alike."""
