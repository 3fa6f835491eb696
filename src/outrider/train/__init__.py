"""Drafts trained for a target: heads on its states, and small drafts of its layers."""
