"""Personas fitted to recorded sessions, with their goodness of fit."""
