"""Outrider inside other libraries, without changes to their code."""
