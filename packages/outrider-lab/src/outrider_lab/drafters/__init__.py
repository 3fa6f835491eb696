"""Drafters that exist to be compared; entry points of the group `outrider.drafters` name them."""
