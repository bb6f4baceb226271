"""Helpers that every layer may use: files, text, arrays, modules, progress."""
