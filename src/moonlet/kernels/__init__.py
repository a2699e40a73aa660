"""Operators and number formats: one file per op, a reference beside every fast backend."""
