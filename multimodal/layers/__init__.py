"""Layers: torch only, plain keyword arguments, no config, no model names."""
