"""Prompts of six kinds, what answers to them are worth, and how fast every drafter writes these."""
