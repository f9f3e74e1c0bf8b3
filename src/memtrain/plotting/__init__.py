"""Figures, tables and HTML pages."""
