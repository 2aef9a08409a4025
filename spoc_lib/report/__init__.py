"""Figures, tables, provenance, offline HTML, and the index of runs."""
