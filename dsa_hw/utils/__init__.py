"""Helpers for every layer: arrays, example inputs, files, modules, progress, text."""
