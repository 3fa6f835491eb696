"""Drafts trained for a target that is there: heads on its states, and small drafts of its layers."""
