"""The workbench's own version; pyproject.toml reads it here."""

VERSION = "0.1.0"
